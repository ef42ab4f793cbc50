"""Runs that are killed and resumed: cells of the kill matrix of scripts/net (places x modes)."""

from __future__ import annotations

import pytest
from net.kills import kill_case
from net.modes import MODES
from net.trees import CURRENT, Bench

CELLS = [
    ("everything", "a step after a checkpoint"),
    ("agents", "a step after a checkpoint"),
    ("reuse", "random instant"),
    ("no_journal", "SIGTERM"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize(("mode", "place"), CELLS)
def test_a_killed_run_ends_as_an_uninterrupted_one(bench: Bench, mode: str, place: str) -> None:
    """`python -m net kills` runs other cells, `--all` all of them; `--mode`, `--place` and `--seed` repeat one."""
    assert not kill_case(bench, CURRENT, MODES[mode], place, 0)
