"""`rollover sample`: whole episodes of an environment and of a workflow, to be read; a prompt for single turns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import runs
from test_workflow_function_run import recipe as of_function
from test_workflow_run import recipe as of_environment

from rollover.cli import main


def test_episodes_of_an_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(of_environment(tmp_path, "Game"))]
    assert main([*words, "--num", "2"]) == 0
    said = capsys.readouterr().out
    first, second = said.split("--- 2 of 2\n")
    for episode in (first, second):
        assert (
            re.search(r"^policy: score [\d.]+$", episode, re.M) and len(re.findall(r"^  turn \d ", episode, re.M)) == 3
        )
        assert re.search(r"^  prompt +u:count to \d+", episode, re.M) and re.search(r"^  answer +u:more", episode, re.M)
    assert first.partition("\n")[2] != second, "each has draws of its own"
    assert main([*words, "--prompt", "begin", "--columns", '{"answer": "77"}']) == 0
    said = capsys.readouterr().out
    assert "u:begin (up to 77)" in said and "policy: score" in said


def test_episodes_of_a_workflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(of_function(tmp_path, "talk"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if re.match(r"\w+: score", line)]
    assert [head.partition(":")[0] for head in heads] == ["solver", "judge"]
    solver = lines[lines.index(heads[0]) : lines.index(heads[1])]
    assert [line.split()[0] for line in solver[1:] if line.startswith("  ") and line[2] != " "] == [
        "prompt", "turn", "answer", "turn"
    ]  # fmt: skip


def test_what_cannot_be_sampled_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = runs.write(tmp_path / "plain")
    assert main(["sample", str(plain)]) == 2
    assert "is asked with --prompt TEXT" in capsys.readouterr().err
    file = of_function(tmp_path, "talk")
    file.write_text(file.read_text().partition("[[tasks.sources]]")[0])
    assert main(["sample", str(file)]) == 2
    assert "there is no task: set [[tasks.sources]]" in capsys.readouterr().err
