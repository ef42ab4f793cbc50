"""Every folder of examples/: its page, its files and what they name, and that figure and numbers are those measured."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from documents import ROOT
from rollover import cli
from rollover.config.load import load_config
from rollover.functions import load_function

EXAMPLES = ROOT / "examples"
OTHERS = ("notebooks", "__pycache__")  # tests/integration/test_running_page.py runs the notebooks
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir() and path.name not in OTHERS)
HEADINGS = ["What it shows", "Run", "Expect", "Change next"]
MAX_LINES, MAX_FIGURE_BYTES = 60, 60_000

every_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def load(path: Path) -> ModuleType:
    """A file of examples/ as a module, without running it as a program."""
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(folder: Path) -> list[list[str]]:
    """The words of each command that the page says to run, in the folder that it says to go to first."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^## Run\n+```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block, "no commands"
    first, *lines = block[1].splitlines()
    assert first == f"cd examples/{folder.name}"
    return [shlex.split(line, comments=True) for line in lines]


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def test_there_are_examples_and_the_index_has_all_of_them() -> None:
    assert len(FOLDERS) >= 8
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[\w+\]\((\w+)/README\.md\)", index, re.MULTILINE)) == {f.name for f in FOLDERS}


@every_folder
def test_a_page_says_what_a_reader_wants_to_know(folder: Path) -> None:
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert re.search(r"\bminutes?\b", text.partition("## Run")[2].partition("##")[0]), "how long it takes"
    assert text.partition("## Change next")[2].count("\n- ") >= 2


@every_folder
def test_files_are_short(folder: Path) -> None:
    files = [path for path in folder.iterdir() if path.suffix in (".py", ".toml", ".jsonl", ".txt")]
    assert files
    assert {p.name: n for p in files if (n := len(p.read_text(encoding="utf-8").splitlines())) >= MAX_LINES} == {}


@every_folder
def test_links_lead_somewhere(folder: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", (folder / "README.md").read_text(encoding="utf-8"))
    there = {target: (folder / target.partition("#")[0]).resolve() for target in targets if "://" not in target}
    assert [target for target, path in there.items() if not path.exists()] == []


@every_folder
def test_commands_are_taken_as_they_are_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe resolves, with nothing in it that is reset or without effect; what it names is there."""
    monkeypatch.chdir(folder)
    for program, *words in commands(folder):
        if program == "rollover":
            parser = cli.build_parser()
            rest, overrides = cli.split_overrides(words, parser)
            files = parser.parse_args(rest).files
            resolved = load_config(files, overrides)
            assert not resolved.notices
            for name in re.findall(r'"([\w./]+\.py:\w+)"', Path(files[-1]).read_text(encoding="utf-8")):
                load_function(name, ".")
        else:
            assert program == "python"
            compile(Path(words[0]).read_text(encoding="utf-8"), words[0], "exec")


@every_folder
def test_figure_and_numbers_are_those_measured(folder: Path) -> None:
    figure = load(EXAMPLES / "figure.py")
    drawn, page = folder / "figure.svg", (folder / "README.md").read_text(encoding="utf-8")
    assert drawn.stat().st_size < MAX_FIGURE_BYTES
    assert drawn.read_text(encoding="utf-8") == figure.svg(results(folder))
    assert page == figure.readme(page, results(folder))
    assert "](figure.svg)" in page and "->" in figure.sentences(results(folder))


@every_folder
def test_what_was_measured_is_what_the_page_says_to_run(folder: Path) -> None:
    said = [shlex.join(words) for words in commands(folder)]
    assert results(folder)["command"] in said
    assert all(len(run["reward"]) > 1 for run in results(folder)["runs"].values())


def test_changed_numbers_are_found() -> None:
    """The comparison sees another number in the page, and in the curve."""
    figure = load(EXAMPLES / "figure.py")
    run: dict[str, Any] = {"reward": [0.1, 0.9], "also": [], "seed": 0, "seconds": 61}
    run |= {"held_out": [[0, 0.2, 0.1, 0.3]], "held_out_tasks": [4, 2]}
    of = {"command": "c", "commit": "x", "date": "d", "note": "", "also": "", "runs": {"": run}}
    page = figure.readme("<!-- measured -->\n<!-- end -->", of)
    assert "0.20 [0.10, 0.30]" in page and "0.10 -> 0.50" in page and "1:01 minutes" in page
    before = figure.svg(of)
    run["reward"][1] = 0.8
    assert figure.svg(of) != before and figure.readme(page, of) != page
