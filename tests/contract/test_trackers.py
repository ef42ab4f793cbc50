"""What every tracker of a run keeps to: ours by the table, and one of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow.parquet import read_table

from rollover.config.load import load_config
from rollover.track.build import TRACKERS, build_trackers
from rollover.track.trace import Trace
from rollover.track.tracker import Cut, RecordedGroup, RunInfo, Tracker, Trackers
from samples import group, rollout, segment

OWN = """
from rollover.track.tracker import Tracker

class Last(Tracker):
    def on_step(self, row):
        row["step"] = 99  # a copy: nobody else sees that
"""
EVENTS = [name for name in vars(Tracker) if not name.startswith("_") and name != "wants_groups"]


@pytest.fixture
def built(tmp_path: Path) -> Callable[[], Trackers]:
    """The trackers of a process of one run; each call is the next process."""
    (tmp_path / "own.py").write_text(OWN)
    overrides = [
        ("track.trackers", f'["{tmp_path}/own.py:Last"]'),
        ("track.live", "plain"),
        ("track.format", '["jsonl", "parquet"]'),
    ]
    config = load_config([], overrides, require_sources=False).config
    return lambda: build_trackers(config, tmp_path)


def recorded(number: int) -> RecordedGroup:
    of = group(number, [rollout(number, sibling, 0.5, [segment([1, 2])]) for sibling in range(2)])
    return RecordedGroup(of, ["text"] * len(of.rollouts), [0.5] * len(of.rollouts))


def tell(tracker: Tracker, step: int) -> None:
    """Everything that happens around a step."""
    tracker.on_phase("training")
    groups = [recorded(step)]
    tracker.on_groups(step, groups)
    tracker.on_step({"step": step, "reward/mean": 0.5, "loss": None})
    tracker.on_message("a line")
    tracker.on_eval({"step": step, "mean": 0.5})


def files(folder: Path) -> dict[str, Any]:
    """What is in them: bytes, or rows where bytes say when something was written."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {
        str(path.relative_to(folder)): read_table(path).to_pylist() if path.suffix == ".parquet" else path.read_bytes()
        for path in found
    }


def info(folder: Path, *, resumed: bool = False) -> RunInfo:
    return RunInfo("demo", folder, {}, resumed)


NAMES = [*TRACKERS, "own"]


def of_name(trackers: Trackers, name: str) -> Tracker:
    return trackers.named[name] if name in TRACKERS else next(iter(trackers.named.values()))


@pytest.mark.parametrize("name", NAMES)
def test_it_takes_every_event_in_order(built: Callable[[], Trackers], name: str, tmp_path: Path) -> None:
    tracker = of_name(built(), name)
    tracker.on_start(info(tmp_path))
    tracker.truncate(Cut(-1))
    for step in (1, 2):
        tell(tracker, step)
    tracker.close()


# The table of metrics is made again from the file of them: tests/integration/test_parquet_run.py.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "metrics table"])
def test_a_run_that_goes_on_leaves_what_a_whole_one_leaves(
    built: Callable[[], Trackers], name: str, tmp_path: Path
) -> None:
    """Steps 1 to 3, where a process that was killed after its second step is followed by one that goes on after the
    first. Groups that come again are those of the step that was lost."""
    left = {}
    for way in ("whole", "killed"):
        tracker = of_name(built(), name)
        tracker.on_start(info(tmp_path))
        tracker.truncate(Cut(-1))
        tell(tracker, 1)
        if way == "killed":
            tracker.on_groups(1, [recorded(5)])  # dropped after the checkpoint
        tell(tracker, 2)
        if way == "killed":
            tracker.close()
            tracker = of_name(built(), name)
            tracker.on_start(info(tmp_path, resumed=True))
            tracker.truncate(Cut(1, next_group_id=2))
            tell(tracker, 2)
        tell(tracker, 3)
        tracker.close()
        left[way] = files(tmp_path)
    assert left["whole"] == left["killed"]


def test_the_protocol_is_taken_as_a_whole_by_the_list(built: Callable[[], Trackers]) -> None:
    """An event that the list, or the guard around an own tracker, did not hand on would be told to nobody."""
    trackers = built()
    for kind in (Trackers, type(of_name(trackers, "own"))):
        assert {*EVENTS, "wants_groups"} <= vars(kind).keys(), kind


def test_each_hears_of_each_event_once_in_the_order_of_the_list() -> None:
    heard: list[tuple[str, str]] = []

    def listening(name: str) -> Tracker:
        def hear(event: str):
            return lambda self, *arguments: heard.append((event, name))

        return type("Listening", (Tracker,), {event: hear(event) for event in EVENTS})()

    trackers = Trackers()
    for name in ("first", "second"):
        trackers.add(name, listening(name))
    trackers.on_start(info(Path(".")))
    trackers.truncate(Cut(-1))
    tell(trackers, 1)
    trackers.close()
    events = ["on_start", "truncate", "on_phase", "on_groups", "on_step", "on_message", "on_eval"]
    assert heard[:-2] == [(event, name) for event in events for name in ("first", "second")]
    assert set(heard[-2:]) == {("close", "first"), ("close", "second")}


def test_the_table_names_them_and_a_row_is_its_writers_alone(built: Callable[[], Trackers], tmp_path: Path) -> None:
    trackers = built()
    first, *rest = trackers.named
    assert rest == list(TRACKERS) and first.endswith("own.py:Last"), "a step that our files have was told to it"
    row = {"step": 1}
    trackers.on_step(row)
    assert row == {"step": 1} and (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert trackers.of_type(Trace) is trackers.named["trace"] and trackers.stats() == {"trackers/failed": 0}


def test_all_are_closed_though_one_fails() -> None:
    closed: list[str] = []

    class Closing(Tracker):
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "b":
                raise OSError("full")

    trackers = Trackers()
    for name in "abc":
        trackers.add(name, Closing(name))
    with pytest.raises(OSError, match="full"):
        trackers.close()
    assert sorted(closed) == ["a", "b", "c"]
