"""The command line as users know it, frozen in tests/golden/cli.txt, and what every kind of error exits with.

A deliberate change: `UPDATE_GOLDEN=1 pytest tests/unit/test_cli_surface.py`, and say so in CHANGELOG.md.
"""

import argparse
import errno
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from rollover import cli
from rollover.checkpoint.store import CheckpointWriteError, CorruptCheckpointError
from rollover.config import describe, recipes
from rollover.config.load import load_config
from rollover.config.schema import default_of, expected, leaves
from rollover.config.table import needs_of, row_of
from rollover.trainer.backend import BackendLost

GOLDEN = Path(__file__).parents[1] / "golden" / "cli.txt"
SRC = Path(__file__).parents[2] / "src"


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (sub,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(sub.choices)


def surface() -> str:
    parser = cli.build_parser()
    lines = []
    for name, verb in {"": parser, **verbs_of(parser)}.items():
        lines.append(f"rollover {name}".strip())
        for action in verb._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            words = " ".join(action.option_strings) or str(action.metavar or action.dest)
            takes = f" {action.metavar}" if action.option_strings and action.metavar else ""
            extra = {"nargs": action.nargs, "choices": action.choices, "default": action.default}
            shown = " ".join(f"{k}={v}" for k, v in extra.items() if v not in (None, False, "==SUPPRESS=="))
            lines.append(f"    {words}{takes}  {shown}{'  required' if action.required else ''}".rstrip())
    lines += ["", "keys (name = default: what it takes)"]
    for name, info in leaves():
        conditions = "".join(f"; {condition}" for condition in needs_of(info))
        lines.append(f"    {name} = {describe.toml_value(default_of(name))}: {expected(info)}{conditions}")
        if row := row_of(info.annotation):
            lines += [f"    {name}[].{field}: {expected(i)}" for field, i in leaves(row)]
    return "\n".join(lines) + "\n"


def test_surface_is_frozen():
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(surface(), encoding="utf-8")
    assert surface() == GOLDEN.read_text(encoding="utf-8")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text('[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n')
    return str(path)


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **functions) -> None:
    """Stands in for a module that a verb imports when it runs."""
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**functions))


def fail_with(error: BaseException):
    def run(*args) -> int:
        raise error

    return run


def test_train_passes_files_overrides_and_resume(monkeypatch, recipe, tmp_path):
    over = tmp_path / "over.toml"
    over.write_text("[train]\nnum_steps = 3\nlearning_rate = 0.5\n")
    calls = []
    fake(monkeypatch, "rollover.api.session", run_training=lambda *args: calls.append(args) or 0)
    assert cli.main(["train", recipe, "--train.num_steps", "5", str(over), "--run.name=a b", "--resume"]) == 0
    ((resolved, resume, command),) = calls
    assert resume is True
    assert command == [recipe, str(over), "--train.num_steps=5", "--run.name=a b"]
    assert resolved.config.train.num_steps == 5
    assert resolved.config.train.learning_rate == 0.5
    assert resolved.config.run.name == "a b"


def test_demo_ignores_files_of_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    calls = []
    fake(monkeypatch, "rollover.api.session", run_training=lambda *args: calls.append(args) or 0)
    assert cli.main(["demo", "--train.num_steps", "2"]) == 0
    (tmp_path / "quickstart.toml").write_text("mine = true")
    assert cli.main(["demo", "--train.num_steps", "2"]) == 0
    shipped = recipes.FOLDER / "quickstart.toml"
    wanted = load_config([shipped], [("train.num_steps", "2")]).config
    assert [(resolved.config, resume) for resolved, resume, _ in calls] == [(wanted, False)] * 2
    # What goes on with it is `rollover train` of the same recipe.
    assert [command[0] for _, _, command in calls] == ["quickstart", str(shipped)]


@pytest.mark.parametrize("platform", ["win32", "cygwin"])
@pytest.mark.parametrize("words", [["--help"], ["train", "x.toml"], ["nonsense"]])
def test_windows_is_refused_in_one_sentence(monkeypatch, capsys, platform, words):
    monkeypatch.setattr(sys, "platform", platform)
    assert cli.main(words) == 2
    out = capsys.readouterr()
    assert out.err == (
        "rollover: error: Rollover does not run on Windows itself: install it in the Windows Subsystem for Linux"
        " (wsl --install)\n"
    )
    assert out.out == ""


def test_the_verb_s_exit_code_is_the_program_s(monkeypatch, recipe):
    fake(monkeypatch, "rollover.api.session", run_training=lambda *args: 130)
    assert cli.main(["train", recipe]) == 130


def test_eval_and_sample_arguments():
    def parsed(*words: str) -> dict:
        return vars(cli.build_parser().parse_args(words))

    none = {"answers": None, "worst": 0, "model": None, "json": False}
    assert none.items() <= parsed("eval", "x.toml").items()
    given = {"answers": Path("out.jsonl"), "worst": 5, "model": "out/model", "json": True}
    words = ["--answers", "out.jsonl", "--worst", "5", "--model", "out/model", "--json"]
    assert given.items() <= parsed("eval", "x.toml", *words).items()
    assert {"prompt": "1 + 1 = ", "num": 3}.items() <= parsed(
        "sample", "x", "--prompt", "1 + 1 = ", "--num", "3"
    ).items()


def test_bench_measures_with_all_threads(monkeypatch):
    calls = []

    def main(what, config, as_json, virtual):
        calls.append((what, config.engine.max_running, config.run.threads, as_json, virtual))
        return 0

    fake(monkeypatch, "benchmarks", main=main)
    assert cli.main(["bench", "engine", "--json", "--engine.max_running", "8"]) == 0
    assert calls == [("engine", 8, 0, True, False)]


@pytest.mark.parametrize(
    ("error", "code", "traceback"),
    [
        (ValueError("reward probe: f raised KeyError"), 2, False),
        (CorruptCheckpointError("step-000020 is not committed"), 2, False),
        (CheckpointWriteError("step-000020 was not written"), 1, False),
        (BackendLost("rank 1 has ended"), 1, False),
        (OSError(errno.ENOSPC, "No space left on device"), 1, False),
        (OSError(errno.EIO, "Input/output error"), 1, False),
        (KeyboardInterrupt(), 130, False),
    ],
)
def test_exit_codes(monkeypatch, capsys, recipe, error, code, traceback):
    fake(monkeypatch, "rollover.api.session", run_training=fail_with(error))
    assert cli.main(["train", recipe]) == code
    out = capsys.readouterr()
    assert "Traceback" not in out.err
    assert (str(error) or "interrupted") in out.err
    assert out.out == ""


@pytest.mark.parametrize("call", [lambda: json.loads("{"), b"\xff".decode])
def test_error_of_a_library_names_library_and_caller(monkeypatch, capsys, recipe, call):
    fake(monkeypatch, "rollover.api.session", run_training=lambda *args, **options: call())
    assert cli.main(["train", recipe]) == 2
    said = capsys.readouterr().err
    assert "error: rollover.commands.train: " in said and "DecodeError of " in said and "ROLLOVER_TRACEBACK=1" in said


@pytest.mark.parametrize(
    "error", [RuntimeError("bug"), PermissionError(errno.EACCES, "no"), AssertionError("invariant")]
)
def test_a_bug_keeps_its_traceback(monkeypatch, recipe, error):
    fake(monkeypatch, "rollover.api.session", run_training=fail_with(error))
    with pytest.raises(type(error)):  # Python prints the traceback and exits with 1
        cli.main(["train", recipe])


def test_traceback_of_an_input_error_on_demand(monkeypatch, capsys, recipe):
    monkeypatch.setenv("ROLLOVER_TRACEBACK", "1")
    fake(monkeypatch, "rollover.api.session", run_training=fail_with(ValueError("why")))
    assert cli.main(["train", recipe]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train"], "FILE.toml"),
        (["train", "x.toml", "--resum"], "--resum"),
        (["train", "x.toml", "--train.num_steps"], "--train.num_steps needs a value"),
        (["train", "x.toml", "--train.num_steps", "--resume"], "--train.num_steps needs a value"),
        (["sample", "x.toml", "--columns", "[1]"], "no JSON object of columns"),
        (["sample", "x.toml", "--prompt", "a", "--num", "0"], "above 0"),
        (["bench", "everything"], "everything"),
        (["config", "--json", "--schema"], "--schema"),
        ([], "VERB"),
    ],
)
def test_wrong_arguments_exit_2(capsys, args, message):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(args)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def options_of(verb: argparse.ArgumentParser) -> list[str]:
    return [word for action in verb._actions for word in action.option_strings if word.startswith("--")]


@pytest.mark.parametrize(
    ("verb", "flag"), [(name, flag) for name, v in verbs_of(cli.build_parser()).items() for flag in options_of(v)]
)
def test_a_slip_in_any_option_of_a_verb_suggests_it_first(capsys, verb: str, flag: str) -> None:
    """Also where the verb then lacks what it needs, and where the option's value looks like another argument."""
    slips = {flag[:i] + flag[i + 1 :] for i in range(3, len(flag))} | {flag[:3] + flag[2:]}
    for slip in sorted(slips):
        with pytest.raises(SystemExit) as exit_info:
            cli.main([verb, slip, "x"])
        assert exit_info.value.code == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"rollover {verb}: error: unknown option {slip}. Did you mean {flag}"), error


def test_what_begins_like_an_option_but_is_a_text_is_one(recipe: str) -> None:
    parse = cli.build_parser().parse_args
    assert parse(["sample", recipe, "--prompt", "--promt is a typo of?"]).prompt == "--promt is a typo of?"
    assert parse(["sample", recipe, "--prompt=--promt"]).prompt == "--promt"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rollout.grup_size", "4"], "Did you mean rollout.group_size?"),
        (["--run.seed", str(2**80)], f"run.seed = {2**80}: integers have 64 bits"),
        (["--checkpoint.resume_from", "step-000020"], "without --resume"),
    ],
)
def test_wrong_configuration_exits_2(capsys, recipe, args, message):
    assert cli.main(["train", recipe, *args]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_missing_file_exits_2_in_a_process(recipe):
    wrong = recipe.replace("recipe.toml", "recpe.toml")
    done = subprocess.run(
        [sys.executable, "-m", "rollover", "train", wrong],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == f"rollover: error: {wrong}: no such file. Did you mean {recipe}?\n"


def test_config_prints_what_loads_again(capsys, recipe, tmp_path):
    assert cli.main(["config", recipe, "--train.num_steps", "7"]) == 0
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    assert cli.main(["config", recipe, "--train.num_steps", "7", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == load_config([again]).config.model_dump(mode="json")
    assert printed["train"]["num_steps"] == 7


def test_schema_needs_no_file(capsys):
    assert cli.main(["config", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"run", "model", "tasks", "rollout", "engine", "algorithm", "train", "rewards"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False
    assert cli.main(["config"]) == 2


def test_notices_go_to_stderr(monkeypatch, capsys, recipe, tmp_path):
    base = tmp_path / "base.toml"
    base.write_text("[eval]\nnum_tasks = 4\nevery_steps = 2\n")
    fake(monkeypatch, "rollover.api.session", run_training=lambda resolved, *rest: resolved.config.eval.every_steps)
    assert cli.main(["train", str(base), recipe, "--eval.num_tasks", "0"]) == 0
    out = capsys.readouterr()
    assert "notice: eval.every_steps = 2" in out.err
    assert out.out == ""
