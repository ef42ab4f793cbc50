"""How a child process of ours is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rollover.processes import child_command, child_environment

SOURCE = str(Path(__file__).parents[2] / "src")


def test_a_child_knows_its_parent_and_gets_words() -> None:
    command = child_command("rollover.rewards.worker", "/base", 7)
    assert command == [sys.executable, "-P", "-m", "rollover.rewards.worker", str(os.getpid()), "/base", "7"]


@pytest.mark.parametrize(("ours", "path"), [(None, SOURCE), ("/mine", os.pathsep.join((SOURCE, "/mine")))])
def test_a_child_imports_this_package_first(monkeypatch: pytest.MonkeyPatch, ours: str | None, path: str) -> None:
    if ours is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", ours)
    assert child_environment()["PYTHONPATH"] == path


def test_a_variable_that_is_set_wins_over_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in child_environment()
    assert child_environment(OMP_NUM_THREADS="1")["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert child_environment(OMP_NUM_THREADS="1")["OMP_NUM_THREADS"] == "3"
