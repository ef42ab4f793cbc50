"""Several runs, asked together and at the same time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from recorded_run import write_run
from rollover.plugins.dashboard.compare import RunComparison
from rollover.plugins.dashboard.run_data import RunData


def runs(tmp_path: Path, count: int) -> list[RunData]:
    places = [tmp_path / str(number) for number in range(count)]
    for place in places:
        place.mkdir()
    return [RunData(write_run(place, steps=1 + number)) for number, place in enumerate(places)]


def test_all_runs_or_those_that_are_named(tmp_path: Path) -> None:
    several = RunComparison(runs(tmp_path, 3))
    assert [of["steps"] for of in several.answer("metrics", {"keys": "reward/mean"})] == [[1], [1, 2], [1, 2, 3]]
    found = several.answer("metrics", {"keys": "reward/mean", "runs": "2,0", "x": "tokens"})
    assert [of["x"] for of in found] == [[23, 42, 61], [23]]
    assert len(several.answer("metrics", {"runs": "0," * 1000})) == 1, "each once"
    assert several.answer("config", {}) == [] and len(several.answer("evaluations", {"runs": "0,1"})) == 1
    for name in several.queries:
        several.answer(name, {})


@pytest.mark.parametrize(
    ("name", "query", "error", "says"),
    [
        ("metrics", {"runs": "3"}, KeyError, "there is no run 3: there are 3"),
        ("metrics", {"runs": "-1"}, KeyError, "there is no run -1"),
        ("secrets", {}, KeyError, "there is no query secrets"),
        ("metrics", {"x": "miles"}, ValueError, "no axis"),
        ("metrics", {"points": "x"}, ValueError, "points"),
        ("metrics", {"keys": ",".join(map(str, range(501)))}, ValueError, "501 keys, at most 500 are allowed"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, name: str, query: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        RunComparison(runs(tmp_path, 3)).answer(name, query)


def test_a_question_waits_for_nobody_who_reads_something_else(tmp_path: Path) -> None:
    (run,) = runs(tmp_path, 1)
    with run.reading("rollouts", "trace"):
        for name in ("state", "keys", "metrics", "evaluations", "warnings", "config"):
            asked = threading.Thread(target=run.answer, args=(name, {}), daemon=True)
            asked.start()
            asked.join(60)
            assert not asked.is_alive(), name
        waiting = threading.Thread(target=run.answer, args=("rollouts", {}), daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()
