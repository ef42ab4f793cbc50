"""TraceIndex: what a trace says, without reading it again."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rollover.plugins.dashboard.trace_index import PARKED, RESUMED, TraceIndex
from rollover.track.trace import TRACE, TraceEvent, TraceFile, acts, engine_visits, spans, trace_events

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


def test_a_visit_of_several_versions_is_a_bar_for_each(tmp_path: Path) -> None:
    index = index_of(tmp_path / TRACE)
    bars = index.bars()
    assert bars["version"].tolist() == [0, 0, 1, 2] and bars["tokens"].tolist() == [5, 4, 1, 3]
    assert bars["start"].tolist() == [0.2, 0.3, 4.0, 4.5] and bars["end"].tolist() == [1.0, 1.5, 4.5, 6.0]
    assert bars["slot"].tolist() == [0, 1, 0, 0]
    assert bars["how"].tolist() == [PARKED, 0, RESUMED, 0]
    assert [index.siblings[number] for number in bars["sibling"]] == ["0", "1.0.1", "0", "0"]
    index = index_of(tmp_path / "before.jsonl", [*EVENTS[:-2], TraceEvent("publish", 8.0, 2)])
    (running,) = index.open_bars()
    assert (running["group"], running["slot"], running["start"], running["end"]) == (11, 2, 0.4, 8.0)


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
    whole = index_of(tmp_path / TRACE, many_events(20_000))
    index = TraceIndex(whole.path)
    index.patience = 0.0
    index.look()
    while True:
        for group in (0, 1, 3, 1000, 9_999, 19_999, 20_000):
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
