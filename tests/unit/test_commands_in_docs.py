"""Every command, key and path that the documentation names exists, and is taken as it is written."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

from documents import PAGES, ROOT, TUTORIALS, commands, spans, variants
from rollover import cli
from rollover.config import Config
from rollover.config.load import load_config
from rollover.config.presets import PRESETS
from rollover.config.schema import field_at, tables
from rollover.config.sft import SUPERVISED
from rollover.plugins.convert.conversion import SYSTEMS

# What a usage line says in place of a value.
VALUES = {"N": "3", "SEED": "0", "VALUE": "3", "--table.key": "--train.num_steps"}
FILES = {"eval.jsonl"}  # names that look like a key
OURS = '[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n'


class Parsed(BaseException):
    """The program has read its arguments, and would begin its work."""


def check(command: str, folder: Path) -> None:
    """Raises (AssertionError, ValueError, SystemExit) for a command that would be refused. Starts nothing."""
    for words in variants(command):
        while words[0] == "nice" or re.fullmatch(r"\w+=\S*", words[0]):
            words = words[1:]
        words = [VALUES.get(word, word.replace("RECIPE", "apr")) for word in words]
        program, *arguments = words
        if program.endswith("python"):
            program, *arguments = arguments[1:] if arguments[0] == "-m" else arguments
        if program in ("rollover", "bench"):
            check_verb(arguments if program == "rollover" else ["bench", *arguments], folder)
        elif program == "make":
            makefile = (ROOT / "Makefile").read_text()
            targets = {word for word in arguments if "=" not in word}
            assert targets <= set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE)), arguments
            variables = {word.split("=")[0] for word in arguments} - targets
            assert variables <= set(re.findall(r"\$[({](?:or \$\()?(\w+)", makefile)) | {"PYTHON"}, arguments
        elif program.endswith("pytest"):
            check_pytest(arguments)
        else:
            check_program(program, arguments)


def check_verb(arguments: list[str], folder: Path) -> None:
    parser = cli.build_parser()
    if len(arguments) == 1:  # the verb is spoken of
        assert arguments[0] in parser.format_help(), arguments
        return
    files = []
    for i, word in enumerate(arguments):
        if word.endswith(".toml") and not (ROOT / word).exists():
            arguments[i] = str(folder / "mine.toml")
    rest, overrides = cli.split_overrides(arguments, parser)
    args = parser.parse_args(rest)
    files = getattr(args, "files", None) or []
    if args.prog == "rollover sft":
        files = [*files, SUPERVISED]
    if files or overrides:
        load_config(files, overrides, require_sources=False)


def check_pytest(arguments: list[str]) -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = [mark.partition(":")[0] for mark in options["markers"]]
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-m", choices=marks)
    parser.add_argument("-k")
    parser.add_argument("paths", nargs="*", type=Path)
    assert all((ROOT / path).exists() for path in parser.parse_args(arguments).paths), arguments


def check_program(program: str, arguments: list[str]) -> None:
    """A script, or a module for `python -m`, up to where it has its arguments."""
    is_script = program.endswith(".py")
    path = ROOT / program if is_script else ROOT / "src" / (program.replace(".", "/") + ".py")
    source = path.read_text()
    assert '__name__ == "__main__"' in source, f"{program} is no program"
    if is_script and not arguments:  # the script is spoken of, or takes its defaults
        return
    if "ArgumentParser" not in source and "bench_arguments" not in source:
        assert not arguments, f"{program} takes no arguments"
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *given: object) -> None:
        parse(self, *given)  # type: ignore[arg-type]
        raise Parsed

    before = sys.argv, sys.path[:]
    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[method-assign, assignment]
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(path.parent))  # what a script imports lies beside it
    try:
        with pytest.raises(Parsed):
            if is_script:
                runpy.run_path(str(path), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        argparse.ArgumentParser.parse_args = parse  # type: ignore[method-assign]
        sys.argv, sys.path[:] = before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)
    (tmp_path / "mine.toml").write_text(OURS)
    return tmp_path


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_is_taken_as_it_is_written(page: str, command: str, folder: Path) -> None:
    check(command, folder)


@pytest.mark.parametrize(
    "command",
    [
        "rollover trian configs/quickstart.toml",
        "rollover nothing",
        "rollover train configs/quickstart.toml --train.num_stepz 3",
        "rollover train configs/quickstart.toml --train.num_steps many",
        "rollover train FILE.toml [--resum]",
        "rollover bench engine|nothing",
        "python scripts/nothing.py",
        "experiments/async_speed.py --case nothing",
        "python experiments/learning_beside_trl.py --nothing 3",
        "python -m benchmarks.nothing",
        "python -m rollover.types",
        "make nothing",
        "pytest tests/nothing",
        "pytest -m nothing",
    ],
)
def test_a_wrong_one_would_be_found(command: str, folder: Path) -> None:
    with pytest.raises((AssertionError, ValueError, SystemExit, OSError, argparse.ArgumentError)):
        check(command, folder)


def test_a_usage_line_means_each_of_its_choices() -> None:
    assert variants("rollover config FILE.toml [--json | --schema]  # what") == [
        ["rollover", "config", "FILE.toml", "--json"],
        ["rollover", "config", "FILE.toml", "--schema"],
    ]
    assert len(variants("rollover bench engine|train [--json]")) == 2


def test_keys_that_are_named_exist() -> None:
    known = {name for name, _ in tables()}
    theirs = {name for system in SYSTEMS.values() for row in system.rows for name in (row.option, *row.also)}
    wrong = []
    for page in [*PAGES, *TUTORIALS]:
        for span in spans(page):
            key = re.sub(r" = .*|^--", "", span)
            first = key.partition(".")[0]
            if re.fullmatch(r"[a-z]+(\.[a-z_0-9]+)+", key) and first in Config.model_fields and key not in FILES:
                if key in known or field_at(key) or field_at(key.replace("tasks.sources.", "tasks.sources.0.")):
                    continue
                if page.name.startswith("coming-from") and key in theirs:
                    continue
                wrong.append(f"{page.name}: {span}")
    assert not wrong, wrong


def test_architecture_is_short_and_names_what_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(text.split()) <= 1200
    package = ROOT / "src" / "rollover"
    layout = text.partition("## Layout")[2].partition("```\n")[2].partition("\n```")[0]
    missing = []
    for indent, name, rest in re.findall(r"^( *)([a-z]+/|\w+\.py)\s+(.*)$", layout, re.MULTILINE):
        base = package if indent else ROOT
        missing += [name] * (not (base / name).exists())
        missing += [
            name + file for file in re.findall(r"(?<![\w/])\w+\.py\b", rest) if not (base / name / file).exists()
        ]
    where = text.partition("## Where is what")[2].partition("## Words")[0]
    missing += [path for path in re.findall(r"`(\w+(?:/\w+)*(?:/|\.py))`", where) if not (package / path).exists()]
    assert not missing
    assert len(re.findall(r"^\| ", where, re.MULTILINE)) > 15, "the rows were found"


def test_paths_that_are_named_exist() -> None:
    wrong = []
    for page in PAGES:
        for span in spans(page):
            if (
                re.fullmatch(r"(src|tests|docs|configs|scripts|experiments)/[\w/.-]+", span)
                and not (ROOT / span).exists()
            ):
                wrong.append(f"{page.name}: {span}")
    assert not wrong, wrong


def test_entries_of_the_log_are_short() -> None:
    """Claim, table, verdict. Raw numbers are in experiments/results."""
    entries = re.split(r"^(?=## )", (ROOT / "docs" / "log.md").read_text(), flags=re.MULTILINE)[1:]
    long = [entry.splitlines()[0] for entry in entries if len(entry.strip().splitlines()) > 20]
    assert len(entries) > 10 and not long, long


def test_the_number_of_presets_is_right() -> None:
    said = re.findall(r"(\d+) presets", (ROOT / "README.md").read_text())
    said += re.findall(r"one of (\d+) \(docs/algorithms.md\)", (ROOT / "docs" / "start.md").read_text())
    assert said == [str(len(PRESETS))] * 2
