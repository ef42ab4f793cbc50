"""All systems: files of their users, mappings, and that no option is lost."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from docs_conversions import in_document
from hypothesis import given, settings
from hypothesis import strategies as st

from options_beside import BESIDE
from rollover.config.load import load_config
from rollover.config.schema import field_at
from rollover.config.table import value_of
from rollover.plugins.convert.bash.script import read_script
from rollover.plugins.convert.conversion import SYSTEMS, convert_file, read_options
from rollover.plugins.convert.lightrft import options_of_flags
from rollover.plugins.convert.mapping import LeftOut, Row, System, Unknown, convert
from rollover.plugins.convert.trl.command import options_of_trl_command
from rollover.plugins.convert.verl.options import options_of_script

# Launch scripts in the styles that users write, in corpus/: each with the options that it gives, the questions that
# it raises, and settings of the run that comes of it once they are answered


CORPUS = Path(__file__).parent / "corpus"
CASES = sorted(path.with_suffix("").name for path in CORPUS.glob("*.toml"))

PROGRAM = re.compile(r"\.main_(?:ppo|dapo)$|fully_async_main$|main_spin$")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Any]:
    """The path of a script and what is expected of it. Nothing is in the working folder."""
    expected = tomllib.loads((CORPUS / f"{request.param}.toml").read_text())
    for name in ("LR", "BATCH", "RESPONSE", "STEPS", "KL", "MODE", "N", "HEAD", "EXTRA_ARGS", "EXTRA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in expected.get("environment", {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return CORPUS / request.param, expected


def overrides_and_accepted(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--accept=") else [word])]
    pairs = list(zip(words[::2], words[1::2], strict=True))
    overrides = [(name.removeprefix("--"), value) for name, value in pairs if name != "--accept"]
    return overrides, [value for name, value in pairs if name == "--accept"]


def test_corpus_has_thirty_scripts() -> None:
    assert len(CASES) >= 30


def test_every_option_of_a_script_is_read(case: tuple[Path, Any]) -> None:
    path, expected = case
    _, options = read_options(path)
    given = {name: value for name, value in options.items() if not isinstance(value, Unknown | LeftOut)}
    wanted = {name: value for name, value in expected["options"].items() if value != "null"}
    assert {name: value for name, value in given.items() if value is not None} == wanted


def test_what_is_not_understood_is_asked_about(case: tuple[Path, Any]) -> None:
    path, expected = case
    if not expected.get("questions"):
        convert_file(path, *overrides_and_accepted(expected.get("answers", [])))
        return
    with pytest.raises(ValueError, match="has to be answered") as error:
        convert_file(path)
    lines = str(error.value).splitlines()[1:]
    asked = {re.split(r": ", line.strip(), maxsplit=1)[0] for line in lines}
    assert asked == set(expected["questions"])


def test_settings_of_an_answered_script_are_the_expected_ones(case: tuple[Path, Any]) -> None:
    path, expected = case
    text, _ = convert_file(path, *overrides_and_accepted(expected.get("answers", [])))
    config = load_config([tomllib.loads(text)]).config
    for key, value in expected["settings"].items():
        found = value_of(config, key)
        if key == "tasks.sources":
            found = [source.model_dump(include=set(value[0])) for source in found]
        assert found == value, key


PROGRAMS = ("basename", "dirname", "date", "cat", "env", "nohup", "tee", "chmod", "bash", "ls", "head", "wc")
WITHOUT_BASH = (
    "docker",
    "ray_job",
    "srun",
    "heredoc_shell",
    "conditions",
    "several_commands",
    "loop.sh",
    "words",
    "prints",
)


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    "name", [n for n in CASES if n.startswith("verl_") and n.endswith(".sh") and not any(w in n for w in WITHOUT_BASH)]
)
def test_bash_itself_gives_the_same_words(name: str, tmp_path: Path) -> None:
    """The one test that runs a script: in a bash that finds a printing `python3` and a few harmless programs."""
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for program in PROGRAMS:
        if place := shutil.which(program):
            (stubs / program).symlink_to(place)
    (stubs / "python3").write_text(f'#!{shutil.which("bash")}\nprintf "%s\\0" "$@" > {tmp_path}/words\n')
    (stubs / "python3").chmod(0o700)
    environment = tomllib.loads((CORPUS / f"{name}.toml").read_text()).get("environment", {})
    environment |= {"PATH": str(stubs), "HOME": str(tmp_path)}
    bash = str(shutil.which("bash"))
    subprocess.run([bash, str(CORPUS / name)], cwd=tmp_path, env=environment, timeout=20, check=False)
    for _ in range(100):  # a command in the background
        if (tmp_path / "words").exists() and (tmp_path / "words").stat().st_size:
            break
        time.sleep(0.05)
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    found = read_script((CORPUS / name).read_text(), str(CORPUS / name), environment).commands
    command = next(command for command in found if any(PROGRAM.search(word.text) for word in command.words))
    texts = [word.text for word in command.words]
    texts = texts[texts.index("-m") :]
    date = time.strftime("%Y%m%d")
    assert texts == [w.replace(f"{tmp_path}/ck", "./ck").replace(date, "now") for w in words[words.index("-m") :]]


# Every row of every mapping: our names exist, and the option changes the resolved run


DOCUMENT = Path(__file__).parents[4] / "docs" / "coming-from.md"
ROWS = [(system, row) for system in SYSTEMS.values() for row in system.rows]
WITH_OURS = [pytest.param(system, row, id=f"{system.name}-{row.option}") for system, row in ROWS if row.keys]
WITHOUT = [pytest.param(system, row, id=f"{system.name}-{row.option}") for system, row in ROWS if not row.keys]


def resolved(system: System, options: dict[str, Any]) -> Any:
    done = convert(system, options)
    assert not done.questions.keys() - {row.option for row in system.rows if row.example is None}
    return load_config([{key: value for key, (value, _) in done.values.items()}]).config


@functools.cache
def plain(name: str) -> Any:
    return resolved(SYSTEMS[name], dict(SYSTEMS[name].base))


@pytest.mark.parametrize(("system", "row"), WITH_OURS)
def test_every_key_exists_and_changes_the_resolved_run(system: System, row: Row) -> None:
    base = dict(system.base) | BESIDE.get((system.name, row.option), {})
    if row.example is None:
        assert convert(system, base | {row.option: "some value"}).questions[row.option]
        assert all(field_at(key) is not None for key in row.keys)
        return
    before = resolved(system, base) if (system.name, row.option) in BESIDE else plain(system.name)
    after = resolved(system, base | {row.option: row.example})
    changed = set()
    for key in row.keys:
        assert field_at(key) is not None, key
        if value_of(before, key) != value_of(after, key):
            changed.add(key)
    assert changed


@pytest.mark.parametrize(("system", "row"), WITHOUT)
def test_options_without_counterpart_have_a_reason(system: System, row: Row) -> None:
    assert row.note
    option = row.option.replace("*", "x")
    done = convert(system, dict(system.base) | {option: "some value"})
    assert (done.left_out if row.neutral is None else done.questions)[option] == row.note


def test_docs_tables_match_the_rows() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(f"<!-- table: {name} -->" in text for name in SYSTEMS)
    assert "<!-- table: differences -->" in text
    assert in_document(DOCUMENT) == text, "run: python scripts/docs_conversions.py docs/coming-from.md"


# Generated launch scripts: each option is read with its value, or asked about by its name, however it is written


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


PROGRAM_NAMES = {
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
    command = data.draw(st.sampled_from([" ", " \\\n  "])).join([PROGRAM_NAMES[system], *words])
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


# Tools that a run is shown in, of other systems' files: what is taken over, and left out with a reason; and keys


KEY = "0123456789abcdef0123456789abcdef01234567"


def track(system: str, **options: Any) -> dict[str, Any]:
    """What [track] and run.name become of the least configuration with these options; nothing is asked."""
    done = convert(SYSTEMS[system], dict(SYSTEMS[system].base) | options)
    assert not done.questions.keys() & options.keys()
    values = {key: value for key, (value, _) in done.values.items()}
    load_config([values])
    return {key: value for key, value in values.items() if key.startswith("track.") or key == "run.name"}


def left_out(system: str, **options: Any) -> dict[str, str]:
    done = convert(SYSTEMS[system], dict(SYSTEMS[system].base) | options)
    return {name: reason for name, reason in done.left_out.items() if name in options}


@pytest.mark.parametrize(
    ("system", "options", "becomes"),
    [
        ("verl", {}, {}),
        ("verl", {"trainer.logger": ["console", "file"], "trainer.project_name": "p"}, {}),
        ("verl", {"trainer.logger": "console"}, {}),
        ("verl", 
            {"trainer.logger": ["console", "tracking"], "trainer.project_name": "p", "trainer.experiment_name": "e"},
            {"track.trackers": ["wandb"], "track.project": "p", "run.name": "e", "track.tracker_rollouts": 0},
        ),
        ("verl", 
            {"trainer.logger": ["swanlab", "mlflow"], "trainer.log_val_generations": 10},
            {"track.trackers": ["swanlab", "mlflow"], "track.tracker_rollouts": 10},
        ),
        ("trl", {"report_to": "none", "project": "p"}, {}),
        ("trl", {"report_to": "wandb", "project": "p"}, {"track.trackers": ["wandb"], "track.tracker_rollouts": 0}),
        ("trl", 
            {"report_to": ["trackio"], "project": "p", "run_name": "r", "log_completions": True},
            {"track.trackers": ["trackio"], "track.project": "p", "run.name": "r"},
        ),
        ("axolotl", {"wandb_name": "n", "wandb_entity": "us", "use_wandb": False, "wandb_log_model": "end"}, {}),
        ("axolotl", 
            {"wandb_project": "p", "wandb_name": "n", "wandb_entity": "us", "wandb_log_model": "checkpoint"},
            {
                "track.trackers": ["wandb"], "track.project": "p", "run.name": "n", "track.entity": "us",
                "track.artifacts": ["model"], "track.tracker_rollouts": 0,
            },
        ),
        ("axolotl", {"wandb_project": "p", "wandb_mode": "disabled", "wandb_name": "n"}, {}),
        ("axolotl", 
            {
                "use_tensorboard": True, "mlflow_experiment_name": "m", "hf_mlflow_log_artifacts": True,
                "mlflow_run_name": "r",
            },
            {
                "track.trackers": ["tensorboard", "mlflow"], "track.project": "m", "run.name": "r",
                "track.artifacts": ["model"], "track.tracker_rollouts": 0,
            },
        ),
        ("lightrft", {"wandb_project": "p", "wandb_run_name": "n"}, {}),
        ("lightrft", 
            {"use_wandb": KEY, "wandb_project": "p", "wandb_run_name": "n", "wandb_org": "us", "wandb_group": "g"},
            {
                "track.trackers": ["wandb"], "track.project": "p", "run.name": "n", "track.entity": "us",
                "track.group": "g", "track.tracker_rollouts": 0,
            },
        ),
        ("lightrft", 
            {"use_tensorboard": "runs", "wandb_org": "us"},
            {"track.trackers": ["tensorboard"], "track.tracker_rollouts": 0},
        ),
    ],
)  # fmt: skip
def test_trackers_and_their_options(system: str, options: dict[str, Any], becomes: dict[str, Any]) -> None:
    assert track(system, **options) == becomes


def test_unsupported_tracker_is_left_out_without_question() -> None:
    options = {"trainer.logger": ["clearml", "wandb"]}
    assert track("verl", **options)["track.trackers"] == ["wandb"]
    assert "there is no clearml: a run is shown in wandb" in left_out("verl", **options)["trainer.logger"]
    assert track("trl", report_to=["comet_ml", "trackio"])["track.trackers"] == ["trackio"]
    assert "comet_ml" in left_out("trl", report_to=["comet_ml", "trackio"])["report_to"]
    assert track("trl", report_to="all") == {}
    assert "name them in `track.trackers`" in left_out("trl", report_to="all")["report_to"]


def test_second_project_is_left_out_with_a_reason() -> None:
    options = {"wandb_project": "p", "mlflow_experiment_name": "m"}
    assert track("axolotl", **options)["track.project"] == "p"
    assert left_out("axolotl", **options) == {"mlflow_experiment_name": "all tools have one project, p"}


SCRIPT = """export WANDB_PROJECT="mine"
python examples/gsm8k_geo3k/train_colocate.py --pretrain me/mine --text_only --advantage_estimator group_norm \\
    --use_kl_loss --kl_estimator k3 --prompt_data /data --input_key prompt --n_samples_per_prompt 8 \\
    --rollout_batch_size 8 --train_batch_size 64 --use_wandb "${WANDB_API_KEY}" --wandb_project "${WANDB_PROJECT}"
"""


def test_key_in_the_environment_is_not_printed(convert_file, monkeypatch: pytest.MonkeyPatch) -> None:
    """LightRFT's --use_wandb takes it."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    words = ("--rewards.function", "boxed", "--train.num_steps", "9")
    config, text = convert_file("run.sh", SCRIPT, *words)
    assert KEY not in text and 'trackers = ["wandb"]  # use_wandb = ***' in text
    assert (config.track.trackers, config.track.project) == (["wandb"], "mine")


def test_conditional_logger_is_left_out_without_question(convert_file) -> None:
    script = """logger=wandb
if [ -n "$DEBUG" ]; then
    logger=console
fi
python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet \\
    actor_rollout_ref.model.path=me/mine actor_rollout_ref.rollout.n=8 trainer.total_training_steps=5 \\
    trainer.logger=$logger trainer.project_name=p
"""
    config, text = convert_file("run.sh", script)
    assert "trainer.logger is left out" in text and "under a condition" in text
    assert config.track.trackers == []
