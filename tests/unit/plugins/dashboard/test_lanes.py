"""Slots over time: bars where there are few, and of many cells that leave nothing out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollover.plugins.dashboard.lanes import window
from rollover.plugins.dashboard.trace_index import TraceIndex
from rollover.track.trace import TRACE, TraceEvent, TraceFile


def index_of(tmp_path: Path, events: list[TraceEvent]) -> TraceIndex:
    TraceFile(tmp_path / TRACE).write(events)
    index = TraceIndex(tmp_path / TRACE)
    index.look()
    return index


def visit(group: int, start: float, end: float, segments, kind: str = "finish", begin: str = "start"):
    begun = TraceEvent(begin, start, 0, group, 0)
    return [begun, TraceEvent(kind, end, 0, group, 0, tokens=1, segments=tuple(segments))]


def in_order(*events: list[TraceEvent]) -> list[TraceEvent]:
    return sorted([event for of in events for event in of], key=lambda event: event.seconds)


@pytest.fixture
def small(tmp_path: Path) -> TraceIndex:
    return index_of(
        tmp_path,
        in_order(
            visit(0, 0.0, 4.0, [(0, 8)]),
            visit(1, 1.0, 3.0, [(0, 2)], kind="park"),
            visit(1, 5.0, 9.0, [(0, 1), (1, 3)], begin="resume"),
            [TraceEvent("drop", 9.5, 1, 1, None, 0, 6, (), "stale"), TraceEvent("start", 9.6, 1, 2, 3)],
            [TraceEvent("train_start", 4.0, 0), TraceEvent("train_end", 5.0, 0), TraceEvent("publish", 5.0, 1)],
            [TraceEvent("generate_start", 9.0, 1), TraceEvent("ready", 10.0, 1, 0, None)],
        ),
    )


def test_bars(small: TraceIndex) -> None:
    found = window(small, 0.0, 10.0, 100)
    assert found["cells"] is None and found["seconds"] == 10.0 and found["lanes"] == [[0, 0], [0, 1]]
    bars = found["bars"]
    told = list(zip(*(bars[key] for key in ("lane", "start", "end", "group", "version", "tokens", "how")), strict=True))
    assert told == [
        (1, 1.0, 3.0, 1, 0, 2, 2 | 4),  # parked, of a group that was dropped later
        (0, 0.0, 4.0, 0, 0, 8, 0),
        (0, 5.0, 6.0, 1, 0, 1, 1 | 4),
        (0, 6.0, 9.0, 1, 1, 3, 4),
        (0, 9.6, 10.0, 2, 1, 0, 8),  # still runs
    ]
    assert [bars["siblings"][number] for number in bars["sibling"]] == ["0", "0", "0", "0", "3"]
    assert found["spans"] == {
        "train": {"start": [4.0], "end": [5.0], "version": [0]},
        "generate": {"start": [9.0], "end": [10.0], "version": [1]},
    }
    assert found["published"] == {"seconds": [5.0], "of": 1, "version": [1]}
    assert found["drops"] == {"seconds": [9.5], "of": 1, "group": [1], "reason": [0], "tokens": [6]}
    assert found["reasons"] == ["stale"]


def test_a_window_has_what_reaches_into_it(small: TraceIndex) -> None:
    found = window(small, 3.5, 5.5, 100)
    assert found["bars"]["group"] == [0, 1] and found["bars"]["start"] == [0.0, 5.0]
    assert found["published"]["of"] == 1 and found["drops"]["of"] == 0 and list(found["spans"]) == ["train"]
    assert found["lanes"] == [[0, 0], [0, 1]]  # the lanes stay where they are, whatever the window
    assert window(small, 20.0, 30.0, 100)["bars"]["group"] == []


def test_many_bars_are_cells_that_add_up(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    events, busy = [], np.zeros(3)
    for slot in range(3):
        now = slot / 1000
        for number in range(400):
            start = now + rng.uniform(0, 0.3)
            now = start + rng.uniform(0.01, 0.4)
            events.append(visit(1000 * slot + number, start, now, [(number // 50, 5)]))
    index = index_of(tmp_path, in_order(*events))
    of_bars = index.bars()
    for slot in range(len(busy)):
        of_slot = of_bars[of_bars["slot"] == slot]
        busy[slot] = (of_slot["end"] - of_slot["start"]).sum()
    whole = window(index, 0.0, index.seconds, 150, most_bars=100)
    cells = whole["cells"]
    assert whole["bars"] is None and len(whole["lanes"]) == 3
    width = index.seconds / 150
    told = np.zeros(3)
    covered = set()
    for lane, column, length, share in zip(cells["lane"], cells["column"], cells["length"], cells["busy"], strict=True):
        told[lane] += length * share / 20 * width
        cell = {(lane, column + more) for more in range(length)}
        assert not cell & covered and column + length <= 150 and 1 <= share <= 20
        covered |= cell
    assert told == pytest.approx(busy, rel=0.03)
    # The version of a cell is that which worked longest in it.
    lane, column = cells["lane"][20], cells["column"][20]
    left, seconds = column * width, {}
    for bar in of_bars[of_bars["slot"] == lane]:
        inside = min(bar["end"], left + width) - max(bar["start"], left)
        if inside > 0:
            seconds[int(bar["version"])] = seconds.get(int(bar["version"]), 0.0) + inside
    assert cells["version"][20] == max(seconds, key=lambda version: seconds[version])


def test_ten_thousand_steps_are_no_more_than_a_screen_has(tmp_path: Path) -> None:
    events = []
    for step in range(10_000):
        events += [TraceEvent("train_start", step, step), TraceEvent("train_end", step + 0.7, step)]
        events += [TraceEvent("publish", step + 0.8, step + 1)]
        events += [TraceEvent("drop", step + 0.9, step, step, None, 0, 1, (), "stale")]
    found = window(index_of(tmp_path, events), 0.0, 10_000.0, 500)
    assert len(json.dumps(found)) < 60_000
    assert found["drops"]["of"] == found["published"]["of"] == 10_000
    assert found["spans"]["train"]["start"][0] == 0 and found["spans"]["train"]["end"][-1] >= 9999


def test_environments_at_work_have_lanes_of_their_own(tmp_path: Path) -> None:
    events = [
        TraceEvent("act", 1.0, 0, 0, 0, tokens=3, segments=((0, 3),)),
        TraceEvent("act", 2.0, 0, 1, "1.0.1", tokens=3, segments=((0, 3),)),
        TraceEvent("answer", 4.0, 0, 0, 0),
        TraceEvent("answer", 5.0, 0, 1, "1.0.1"),
        TraceEvent("act", 6.0, 1, 0, 0, tokens=3, segments=((0, 3),)),
        TraceEvent("publish", 9.0, 1),
    ]
    index = index_of(tmp_path, events)
    acts = window(index, 0.0, 9.0, 100)["acts"]
    assert acts["lanes"] == 2 and acts["cells"] is None
    told = list(zip(*(acts["bars"][key] for key in ("lane", "start", "end", "group")), strict=True))
    assert told == [(0, 1.0, 4.0, 0), (1, 2.0, 5.0, 1), (0, 6.0, 9.0, 0)]  # the last one still is
    assert [acts["bars"]["siblings"][number] for number in acts["bars"]["sibling"]] == ["0", "1.0.1", "0"]
    later = window(index, 4.5, 5.5, 100)["acts"]
    assert later["bars"]["group"] == [1] and later["lanes"] == 2  # the lanes stay where they are
    cells = window(index, 0.0, 9.0, 9, most_bars=0)["acts"]["cells"]
    assert (cells["lane"], cells["column"], cells["length"]) == ([0, 0, 1], [1, 6, 2], [3, 3, 3])
    assert set(cells["version"]) == {-1} and set(cells["busy"]) == {20}


def test_a_run_without_environments_has_no_lanes_of_theirs(small: TraceIndex) -> None:
    assert window(small, 0.0, 10.0, 100)["acts"] is None


def test_no_trace_is_an_empty_window(tmp_path: Path) -> None:
    index = TraceIndex(tmp_path / TRACE)
    index.look()
    assert window(index, 0.0, 1.0, 100)["bars"]["lane"] == []
    assert window(index, 0.0, 1.0, 100, most_bars=0)["cells"] is None


@pytest.mark.parametrize(
    ("start", "end", "columns", "says"),
    [(1.0, 1.0, 10, "1 to 1 is no window"), (2.0, 1.0, 10, "2 to 1"), (0.0, 1.0, 0, "columns: 0"),
     (0.0, 1.0, 5000, "columns: 5000 are not 1 to 4000")],
)  # fmt: skip
def test_no_window(tmp_path: Path, start: float, end: float, columns: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        window(TraceIndex(tmp_path / TRACE), start, end, columns)
