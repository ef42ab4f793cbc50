"""The trace of a run: its index, and the lanes drawn of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from rollover.plugins.dashboard.lanes import window
from rollover.plugins.dashboard.trace_index import TraceIndex
from rollover.track.trace import TRACE, TraceEvent, TraceFile, acts, engine_visits, spans, trace_events

# TraceIndex: what a trace says, without reading it again


EVENTS = [
    TraceEvent("generate_start", 0.0, 0),
    TraceEvent("admit", 0.1, 0, 0),
    TraceEvent("admit", 0.1, 0, 11),
    TraceEvent("start", 0.2, 0, 0, 0),
    TraceEvent("start", 0.3, 0, 0, "1.0.1"),
    TraceEvent("start", 0.4, 0, 11, 0),
    TraceEvent("park", 1.0, 0, 0, 0, tokens=5, segments=((0, 5),)),
    TraceEvent("finish", 1.5, 0, 0, "1.0.1", tokens=4, segments=((0, 4),)),
    TraceEvent("generate_end", 2.0, 0),
    TraceEvent("train_start", 2.0, 0),
    TraceEvent("train_end", 3.0, 0),
    TraceEvent("publish", 3.5, 1),
    TraceEvent("resume", 4.0, 1, 0, 0, tokens=5),
    TraceEvent("finish", 6.0, 1, 0, 0, tokens=4, segments=((1, 1), (2, 3))),
    TraceEvent("ready", 6.5, 1, 0, tokens=13),
    TraceEvent("consume", 7.0, 1, 0, tokens=13),
    TraceEvent("drop", 7.5, 1, 11, tokens=0, reason="stale"),
    TraceEvent("train_start", 8.0, 1),
]


def index_of(path: Path, events: list[TraceEvent] = EVENTS) -> TraceIndex:
    TraceFile(path).write(events)
    index = TraceIndex(path)
    index.look()
    return index


def rollout_detail(index: TraceIndex) -> list[object]:
    """All that it says."""
    groups = {event.group for event in EVENTS if event.group is not None}
    arrays = index.bars(), index.open_bars(), index.published(), index.drops()
    return [
        [array.tolist() for array in arrays],
        list(index.spans()),
        index.open_spans(),
        {group: list(index.events_of(group)) for group in groups},
        index.siblings,
        index.reasons,
        index.consumed,
        index.seconds,
    ]


def test_it_is_the_same_however_the_file_grew(tmp_path: Path) -> None:
    whole = rollout_detail(index_of(tmp_path / "whole.jsonl"))
    text = (tmp_path / "whole.jsonl").read_bytes()
    cuts = random.Random(0).sample(range(len(text)), 60)
    growing = TraceIndex(tmp_path / TRACE)
    growing.look()
    for cut in [*sorted(cuts), len(text)]:
        growing.path.write_bytes(text[:cut])
        growing.look()
    assert rollout_detail(growing) == whole


def test_file_cut_back_and_extended_is_read_again(tmp_path: Path) -> None:
    index = index_of(tmp_path / TRACE)
    again = [*EVENTS[:7], TraceEvent("finish", 1.25, 0, 0, "1.0.1", tokens=9, segments=((0, 9),)), *EVENTS[8:]]
    index.path.unlink()
    TraceFile(index.path).write(again)
    index.look()
    assert rollout_detail(index) == rollout_detail(index_of(tmp_path / "other.jsonl", again))
    index.path.unlink()
    index.look()
    assert rollout_detail(index) == rollout_detail(index_of(tmp_path / "none.jsonl", []))


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(tmp_path / TRACE)
    read = []
    parse = json.loads
    monkeypatch.setattr(
        "rollover.plugins.dashboard.trace_index.json.loads", lambda text: read.append(text) or parse(text)
    )
    TraceFile(index.path).write([TraceEvent("train_end", 9.0, 1)])
    index.look()
    assert read == [b'[["train_end",9.0,1]]'] and index.spans()[-1].end == 9.0


def many_events(count: int) -> list[TraceEvent]:
    """Visits of 8 rollouts that come and go."""
    events = [TraceEvent("publish", 0.0, 0)]
    for number in range(count):
        at = float(number)
        events += [TraceEvent("start", at, 0, number, 0), TraceEvent("admit", at, 0, number)]
        events += [TraceEvent("finish", at + 5, 0, number, 0, tokens=3, segments=((0, 3),))]
    return sorted(events, key=lambda event: event.seconds)


def test_trace_index_without_patience_reads_one_chunk(tmp_path: Path) -> None:
    whole = index_of(tmp_path / TRACE, many_events(20_000))
    size = whole.path.stat().st_size
    index = TraceIndex(whole.path)
    index.patience = 0.0
    shares, counts = [], []
    while not shares or shares[-1] < 1:
        index.look()
        shares.append(index.share)
        counts.append(len(index.bars()))
    assert len(shares) == -(-size // (1 << 18)) > 3 and shares == sorted(set(shares))
    assert counts[0] < len(whole.bars()) / 2 and counts == sorted(counts)
    assert index.bars().tolist() == whole.bars().tolist() and index.open_bars().tolist() == whole.open_bars().tolist()


def test_the_events_of_a_group_are_known_wherever_reading_is(tmp_path: Path) -> None:
    whole = index_of(tmp_path / TRACE, many_events(8_000))
    index = TraceIndex(whole.path)
    index.patience = 0.0
    index.look()
    assert index.share < 1
    while True:
        for group in (0, 1, 3, 1000, 3_999, 7_999, 8_000):
            assert list(index.events_of(group)) == list(whole.events_of(group)), (group, index.share)
        if index.share == 1:
            break
        index.look()


def test_slots_are_freed_after_kills_and_drops(tmp_path: Path) -> None:
    """As after a kill, where nobody told of an end: a row of the picture would look busy for ever."""
    events = [
        TraceEvent("start", 0.0, 0, 0, 0),
        TraceEvent("start", 0.0, 0, 1, 0),
        TraceEvent("start", 2.0, 0, 0, 0),
        TraceEvent("drop", 3.0, 0, 1, tokens=0, reason="stale"),
        TraceEvent("start", 4.0, 0, 2, 0),
        TraceEvent("finish", 5.0, 0, 0, 0, tokens=2, segments=((0, 2),)),
        TraceEvent("finish", 6.0, 0, 2, 0, tokens=2, segments=((0, 2),)),
    ]
    index = index_of(tmp_path / TRACE, events)
    assert [(bar["group"], bar["slot"], bar["start"]) for bar in index.bars()] == [(0, 0, 2.0), (2, 1, 4.0)]
    assert len(index.open_bars()) == 0


def test_what_environments_did_is_what_the_trace_says_at_once(tmp_path: Path) -> None:
    rng, events, now = random.Random(2), [], 0.0
    state = dict.fromkeys([(group, sibling) for group in range(6) for sibling in range(2)], "waiting")
    moves = {"waiting": ("start",), "running": ("act", "finish"), "acting": ("answer",), "parked": ("resume",)}
    after = {"start": "running", "resume": "running", "act": "acting", "finish": "waiting", "answer": "parked"}
    for _ in range(3000):
        now = round(now + rng.random(), 6)
        rollout = rng.choice(list(state))
        kind = rng.choice(moves[state[rollout]])
        state[rollout] = after[kind]
        events.append(TraceEvent(kind, now, 1, *rollout, segments=((1, 2),) if kind in ("act", "finish") else ()))
        if rng.random() < 0.01:
            events.append(TraceEvent("drop", now, 1, rollout[0], reason="stale"))
            state |= {key: "waiting" for key in state if key[0] == rollout[0]}
    index = index_of(tmp_path / TRACE, events)
    found = index.acts().tolist()
    expected = [(act.start, act.end, act.group, act.sibling, act.lane) for act in acts(events)]
    assert len(expected) > 300
    assert [(start, end, group, int(index.siblings[sibling]), lane) for start, end, group, sibling, lane in found][
        : len(expected)
    ] == expected
    assert {of[1] for of in found[len(expected) :]} <= {index.seconds}


def test_a_damaged_line_is_named_each_time_it_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / TRACE
    TraceFile(path).write(EVENTS)
    for wrong in (b"[1, 2]\n", b"no\n", b"1,2\n", b"\n", b'["start"\n,"x"]\n'):
        path.write_bytes(b"".join(event.to_line().encode() + b"\n" for event in EVENTS) + wrong)
        index = TraceIndex(path)
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"{TRACE}:{len(EVENTS) + 1}: not a trace event"):
                index.look()


def test_it_agrees_with_the_trace_that_is_read_at_once(tmp_path: Path) -> None:
    rng, events, now, running = random.Random(1), [], 0.0, set()
    for _ in range(12_000):
        now += rng.random()
        rollout = (rng.randrange(40), rng.randrange(4))
        if rollout in running:
            running.remove(rollout)
            segments = tuple((version, rng.randrange(1, 9)) for version in range(rng.randrange(4)))
            events.append(TraceEvent(rng.choice(("park", "finish", "act")), now, 3, *rollout, segments=segments))
        else:
            running.add(rollout)
            events.append(TraceEvent(rng.choice(("start", "resume")), now, 3, *rollout))
    index = index_of(tmp_path / TRACE, events)
    visits = engine_visits(list(trace_events(index.path)))
    expected = [(v.group, v.slot, *bar) for v in visits for bar in v.bars()]
    names = "group", "slot", "version", "tokens", "start", "end"
    assert [tuple(bar[name].item() for name in names) for bar in index.bars()] == expected
    assert spans(events) == [] and len(index.open_bars()) == len(running)


# Slots over time: bars where there are few, and of many cells that leave nothing out


def index_of_lanes(tmp_path: Path, events: list[TraceEvent]) -> TraceIndex:
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
    return index_of_lanes(
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
    index = index_of_lanes(tmp_path, in_order(*events))
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
    found = window(index_of_lanes(tmp_path, events), 0.0, 10_000.0, 500)
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
    index = index_of_lanes(tmp_path, events)
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
