"""Generated launch scripts: each option is read with its value, or asked about by its name, however it is written."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from options_beside import BESIDE
from rollover.plugins.convert.conversion import SYSTEMS
from rollover.plugins.convert.lightrft import options_of_flags
from rollover.plugins.convert.mapping import Unknown, convert
from rollover.plugins.convert.trl.command import options_of_trl_command
from rollover.plugins.convert.verl.options import options_of_script

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
# How an option gets into the command: lines before it, and its words. bare, shell: the option, with its name; flag:
# its name; value, quoted: its value. Of those that are sure the value is known; others may be asked about.
SURE = {
    "inline": ("", "{shell}"),
    "name": ("V{i}={quoted}", '{flag}"$V{i}"'),
    "several": ('ARGS="$ARGS {bare}"', ""),
    "array": ("A{i}=({shell})", '"${{A{i}[@]}}"'),
    "added": ("A{i}=(); A{i}+=({shell})", '"${{A{i}[@]}}"'),
    "default": ("", '{flag}"${{D{i}:-{value}}}"'),
    "assigned_default": (': "${{D{i}:={value}}}"', '{flag}"${{D{i}}}"'),
    "exported": ("export E{i}={quoted} F{i}=1", "{flag}$E{i}"),
    "heredoc": ("H{i}=$(cat <<'EOF'\n{bare}\nEOF\n)", "$H{i}"),
    "appended": ("B{i}=\nB{i}+={quoted}", "{flag}${{B{i}}}"),
    "end_of_path": ("P{i}=/a/b/{quoted}", '{flag}"${{P{i}#/a/b/}}"'),
    "argument": ("set -- {quoted}; G{i}=$1", '{flag}"$G{i}"'),
}
DOUBTFUL = {
    "condition": ('C{i}=()\nif [ "$MODE" = x ]; then\n  C{i}+=({shell})\nfi', '"${{C{i}[@]}}"'),
    "short_condition": ('C{i}=()\n[[ -n "$MODE" ]] && C{i}+=({shell})', '"${{C{i}[@]}}"'),
    "printed": ("", "{flag}$(python3 -c 'print({i})')"),
    "missing": ("", "{flag}$MISSING_{i}"),
    "loop": ("L{i}=\nfor x in $(ls); do L{i}={quoted}; done", "{flag}$L{i}"),
    "case": ("K{i}=0\ncase $MODE in x|y) K{i}={quoted};; esac", "{flag}$K{i}"),
    "doubtful_name": ('W{i}=\n[ -f x ] && W{i}="{bare}"', "$W{i}"),
}


def write(system: str, styles: dict[str, str], options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The lines before the command, and its words."""
    before, words = ["ARGS="], ["$ARGS"]
    for i, (name, value) in enumerate(options.items()):
        is_list, is_verl = isinstance(value, list), system == "verl"
        if is_list and not is_verl or " " in str(value) and not is_list:  # which an unquoted name would part
            styles[name] = "inline"
        flag = f"{name}=" if is_verl else f"--{name} "
        text = str(value).replace(" ", "") if is_list else str(value)
        shell = f"--{name} {' '.join(map(str, value))}" if is_list and not is_verl else flag + shlex.quote(text)
        fields = {"i": i, "flag": flag, "value": text, "quoted": shlex.quote(text), "bare": flag + text, "shell": shell}
        for to, template in zip((before, words), (SURE | DOUBTFUL)[styles[name]], strict=True):
            to += [template.format(**fields)] if template else []
    return before, words


PROGRAMS = {
    "verl": "python3 -m verl.trainer.main_ppo",
    "trl": "accelerate launch --num_processes 2 train.py",
    "lightrft": "torchrun --nproc-per-node 8 train_colocate.py",
}
OPTIONS = {"verl": VERL, "trl": TRL, "lightrft": LIGHTRFT}
READERS = {"verl": options_of_script, "trl": options_of_trl_command, "lightrft": options_of_flags}


FORMS = ("{head}{command}", "{head}nohup {command} > log.txt 2>&1 &", "{head}(cd work && {command}) 2>&1 | tee log.txt",
         "{head}train() {{\n  {command} $1\n}}\ntrain '' # ends")  # fmt: skip


@pytest.mark.parametrize("system", ["verl", "trl", "lightrft"])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_no_option_is_lost_without_a_question(system: str, data: st.DataObject) -> None:
    options = {n: v for n, v in OPTIONS[system].items() if n == next(iter(OPTIONS[system])) or data.draw(st.booleans())}
    styles = {name: data.draw(st.sampled_from([*SURE, *DOUBTFUL]), label=name) for name in options}
    styles[next(iter(options))] = "inline"  # so that the command is one of the system's
    before, words = write(system, styles, options)
    command = data.draw(st.sampled_from([" ", " \\\n  "])).join([PROGRAMS[system], *words])
    form = data.draw(st.sampled_from(FORMS))
    text = form.format(head="#!/bin/bash\nset -euo pipefail\n" + "\n".join(before) + "\n", command=command) + "\n"
    found = READERS[system](text, Path("run.sh"), {})
    done = convert(SYSTEMS[system], found)
    for name, value in options.items():
        assert name in found, (name, text)
        read = found[name]
        if styles[name] in SURE:
            assert read == value, (name, styles[name], read, text)
        else:
            assert isinstance(read, Unknown), (name, styles[name], read, text)
        shown = " ".join(shown for _, shown in done.values.values())
        assert name in done.questions or name in done.left_out or f"{name} = " in shown or _is_idle(system, name), name


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
    asked = [name for name, value in found.items() if isinstance(value, Unknown)]
    assert len(asked) == len({word.replace("${NONE[@]}", "$NONE") for word in words})
