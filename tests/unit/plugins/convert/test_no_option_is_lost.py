"""Generated launch scripts: each option is read with its value, or asked about by its name, however it is written."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from options_beside import BESIDE
from rollover.plugins.convert.lightrft.script import options_of_flags
from rollover.plugins.convert.mapping import Unread, convert
from rollover.plugins.convert.read import SYSTEMS
from rollover.plugins.convert.trl.flags import options_of_trl_command
from rollover.plugins.convert.verl.script import options_of_script

VERL = {
    "data.train_batch_size": 32,
    "data.max_response_length": 777,
    "actor_rollout_ref.rollout.n": 6,
    "actor_rollout_ref.rollout.temperature": 0.65,
    "actor_rollout_ref.actor.optim.lr": 3e-06,
    "actor_rollout_ref.actor.kl_loss_coef": 0.005,
    "actor_rollout_ref.model.path": "org/a-model",
    "trainer.logger": ["console", "wandb"],
    "trainer.experiment_name": "a run",
    "trainer.n_gpus_per_node": 4,
    "algorithm.surprise": "new",
    "data.shuffle": False,
}
TRL = {
    "num_generations": 6,
    "max_completion_length": 777,
    "temperature": 0.65,
    "learning_rate": 3e-06,
    "beta": 0.005,
    "surprise": "new",
    "run_name": "a run",
    "max_steps": 9,
}
LIGHTRFT = {
    "pretrain": "org/a-model",
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 6,
    "adam_betas": [0.9, 0.95],
    "init_kl_coef": 0.005,
    "surprise": "new",
    "save_path": "a run",
}
# How an option gets into the command. Of those that are sure, the value is known; others may be asked about.
SURE = ("inline", "name", "several", "array", "added", "default", "assigned_default", "argument", "exported", "heredoc",
        "appended", "command_name")  # fmt: skip
DOUBTFUL = ("condition", "short_condition", "printed", "missing", "loop", "case", "doubtful_name")


@dataclass
class Written:
    """Lines before the command, words of it, and words that its function is called with."""

    before: list[str]
    words: list[str]
    arguments: list[str]


def text_of(name: str, value: Any, system: str) -> str:
    """An option as one system's command has it, unquoted."""
    if system == "verl":
        return f"{name}={str(value).replace(' ', '') if isinstance(value, list) else value}"
    return f"--{name} {' '.join(map(str, value))}" if isinstance(value, list) else f"--{name} {value}"


def quoted(name: str, value: Any, system: str) -> str:
    if system == "verl":
        return shlex.quote(text_of(name, value, system))
    return f"--{name} {' '.join(shlex.quote(str(item)) for item in (value if isinstance(value, list) else [value]))}"


def write(system: str, styles: dict[str, str], options: dict[str, Any]) -> Written:
    out = Written([], [], [])
    for i, (name, value) in enumerate(options.items()):
        style, one = styles[name], quoted(name, value, system)
        blank = isinstance(value, str) and " " in value  # which an unquoted name would part
        sign = "=" if system == "verl" else " "
        flag = f"{'' if system == 'verl' else '--'}{name}{sign}"
        plain = str(value).replace(" ", "") if isinstance(value, list) else str(value)
        if isinstance(value, list) and system != "verl" or blank and style not in ("array", "condition"):
            out.words.append(one)
            styles[name] = "inline"
        elif style == "name":
            out.before.append(f"V{i}={shlex.quote(plain)}")
            out.words.append(f'{flag}"$V{i}"')
        elif style == "several":
            out.before += [f'ARGS="$ARGS {text_of(name, value, system)}"'] if out.before else [
                f'ARGS="{text_of(name, value, system)}"'
            ]  # fmt: skip
            out.words += [] if "$ARGS" in out.words else ["$ARGS"]
        elif style in ("array", "added"):
            out.before.append(f"{'' if style == 'array' else 'A=(); '}A{i}{'+' if style == 'added' else ''}=({one})")
            out.words.append(f'"${{A{i}[@]}}"')
        elif style in ("default", "assigned_default"):
            out.before += [f': "${{D{i}:={plain}}}"'] if style == "assigned_default" else []
            shown = f"${{D{i}}}" if style == "assigned_default" else f"${{D{i}:-{plain}}}"
            out.words.append(f'{flag}"{shown}"')
        elif style == "argument":
            out.words.append(f'{flag}"${{{len(out.arguments) + 1}}}"')
            out.arguments.append(shlex.quote(plain))
        elif style == "exported":
            out.before.append(f"export E{i}={shlex.quote(plain)} F{i}=1")
            out.words.append(f"{flag}$E{i}")
        elif style == "heredoc":
            out.before.append(f"H{i}=$(cat <<'EOF'\n{text_of(name, value, system)}\nEOF\n)")
            out.words.append(f"$H{i}")
        elif style == "appended":
            out.before += [f"B{i}={shlex.quote(plain[:2])}", f"B{i}+={shlex.quote(plain[2:])}"]
            out.words.append(f"{flag}${{B{i}}}")
        elif style == "command_name":
            out.before.append(f"P{i}=/a/b/{shlex.quote(plain)}" if "/" not in plain else f"P{i}={plain}")
            out.words.append(f'{flag}"${{P{i}##*/}}"' if "/" not in plain else f'{flag}"$P{i}"')
        elif style == "condition":
            out.before.append(f'C{i}=()\nif [ "$MODE" = x ]; then\n  C{i}+=({one})\nfi')
            out.words.append(f'"${{C{i}[@]}}"')
        elif style == "short_condition":
            out.before.append(f'C{i}=()\n[[ -n "$MODE" ]] && C{i}+=({one})')
            out.words.append(f'"${{C{i}[@]}}"')
        elif style == "printed":
            out.words.append(f"{flag}$(python3 -c 'print({i})')")
        elif style == "missing":
            out.words.append(f"{flag}$MISSING_{i}")
        elif style == "loop":
            out.before.append(f"L{i}=\nfor x in $(ls); do L{i}={shlex.quote(plain)}; done")
            out.words.append(f"{flag}$L{i}")
        elif style == "case":
            out.before.append(f"K{i}=0\ncase $MODE in x|y) K{i}={shlex.quote(plain)};; esac")
            out.words.append(f"{flag}$K{i}")
        elif style == "doubtful_name":
            out.before.append(f'W{i}=\n[ -f x ] && W{i}="{text_of(name, value, system)}"')
            out.words.append(f"$W{i}")
        else:
            out.words.append(one)
    return out


PROGRAMS = {
    "verl": "python3 -m verl.trainer.main_ppo",
    "trl": "accelerate launch --num_processes 2 train.py",
    "lightrft": "torchrun --nproc-per-node 8 train_colocate.py",
}
OPTIONS = {"verl": VERL, "trl": TRL, "lightrft": LIGHTRFT}
READERS = {"verl": options_of_script, "trl": options_of_trl_command, "lightrft": options_of_flags}


def script_of(system: str, written: Written, form: str) -> str:
    words = written.words
    command = (
        f"{PROGRAMS[system]} {' '.join(words)}" if "\\" not in form else " \\\n  ".join([PROGRAMS[system], *words])
    )
    head = "#!/bin/bash\nset -euo pipefail\n"
    before = "\n".join(written.before)
    if written.arguments:
        return f"{head}{before}\ntrain() {{\n  {command}\n}}\ntrain {' '.join(written.arguments)} # ends\n"
    if form == "log":
        command = f"nohup {command} > log.txt 2>&1 &"
    elif form == "tee":
        command = f"(cd work && {command}) 2>&1 | tee log.txt"
    return f"{head}{before}\n{command}\n"


@pytest.mark.parametrize("system", ["verl", "trl", "lightrft"])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_no_option_is_lost_without_a_question(system: str, data: st.DataObject) -> None:
    options = {n: v for n, v in OPTIONS[system].items() if n == next(iter(OPTIONS[system])) or data.draw(st.booleans())}
    styles = {name: data.draw(st.sampled_from(SURE + DOUBTFUL), label=name) for name in options}
    styles[next(iter(options))] = "inline"  # so that the command is one of the system's
    form = data.draw(st.sampled_from(["one", "\\", "log", "tee"]))
    text = script_of(system, write(system, styles, options), form)
    found = READERS[system](text, Path("run.sh"), {})
    done = convert(SYSTEMS[system], found)
    for name, value in options.items():
        assert name in found, (name, text)
        read = found[name]
        if styles[name] in SURE:
            assert read == value, (name, styles[name], read, text)
        else:
            assert isinstance(read, Unread), (name, styles[name], read, text)
        shown = " ".join(shown for _, shown in done.values.values())
        assert name in done.questions or name in done.without or f"{name} = " in shown or _is_idle(system, name), name


def _is_idle(system: str, name: str) -> bool:
    """Whether it is an option that is read, and only matters beside another."""
    return (system, name) in BESIDE


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.sampled_from(["stray", "$NONE", "--flag", "-x", "~a.b", "2]", "${NONE[@]}", "a.b"]), max_size=4)
)
def test_every_other_word_is_asked_about(words: list[str]) -> None:
    text = f"python3 -m verl.trainer.main_ppo data.train_batch_size=3 {' '.join(words)}\n"
    found = options_of_script(text, Path("run.sh"), {})
    asked = [name for name, value in found.items() if isinstance(value, Unread)]
    assert len(asked) == len({word.replace("${NONE[@]}", "$NONE") for word in words})
