"""Runs that are killed and resumed: cells of the kill matrix of scripts/net (places x modes)."""

from __future__ import annotations

import time

import pytest
from net.kills import PLACES, kill_case, selection
from net.modes import MODES
from net.trees import CURRENT, Bench

TODAY = int(time.time()) // 86400


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize("number", range(4))
def test_a_killed_run_ends_as_an_uninterrupted_one(bench: Bench, number: int) -> None:
    """Another selection each day; `python -m net kills --mode ... --place ... --seed ...` repeats a cell."""
    mode, place = selection(TODAY, 4)[number]
    if mode == "http_agents":
        pytest.importorskip("openai")
    assert not kill_case(bench, CURRENT, MODES[mode], place, TODAY), (mode, place, TODAY)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_every_place_in_every_mode(bench: Bench, mode: str, place: str) -> None:
    assert not kill_case(bench, CURRENT, MODES[mode], place, TODAY), (mode, place, TODAY)
