"""Runs that are killed and resumed: cells of the kill matrix of scripts/net (places x modes)."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher import Run
from net.kills import kill_case, selection
from net.modes import MODES
from net.trees import REPOSITORY, Bench, Tree

CELLS = [
    ("everything", "a step after a checkpoint"),
    ("agents", "a step after a checkpoint"),
    ("reuse", "random instant"),
    ("no_journal", "SIGTERM"),
]
# Each mode once, and each place about twice; `python -m net kills --all` is the whole matrix.
OTHERS = [cell for cell in selection(1, len(MODES)) if cell not in CELLS]


class Forked(Tree):
    """This tree, whose runs are forks of a process that has imported it."""

    def start(self, words: list[str], folder: Path, environment: dict[str, str], log: Path) -> Run:
        return Run(words, log, folder=folder, variables=environment)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize(("mode", "place"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in OTHERS)])
def test_a_killed_run_ends_as_an_uninterrupted_one(bench: Bench, mode: str, place: str) -> None:
    """`python -m net kills` runs other cells; `--mode`, `--place` and `--seed` repeat one."""
    assert not kill_case(bench, Forked("current", REPOSITORY), MODES[mode], place, 0)
