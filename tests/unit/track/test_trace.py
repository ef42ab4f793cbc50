"""The trace: what it says equals what happened, it survives a file and a restart, and its parts pair up."""

from __future__ import annotations

import resource
from collections import Counter
from pathlib import Path

import pytest

from rollover.plugins.dashboard.verbs.trace import summary
from rollover.rollout.lifecycle import EventKind, RunClock
from rollover.track.perfetto import perfetto
from rollover.track.trace import (
    EngineVisit,
    Trace,
    TraceEvent,
    TraceFile,
    acts,
    busy_share,
    engine_visits,
    trace_events,
)
from rollover.track.trace_svg import draw
from rollover.types import DropReason
from unit.track.traced import MODES, TracedRun, stopped_in_the_middle, traced

every_mode = pytest.mark.parametrize("mode", MODES)


@every_mode
def test_the_trace_is_the_ledger(mode: str) -> None:
    run = traced(mode, 12)
    kinds = Counter(e.kind for e in run.trace)
    metrics = run.lifecycle.metrics()
    assert sum(e.tokens for e in run.trace if e.kind in ("park", "finish")) == metrics["tokens/generated"]
    assert kinds["admit"] == metrics["groups/admitted"] and kinds["consume"] == metrics["groups/consumed"] == 24
    assert kinds["drop"] == metrics["groups/dropped"] and kinds["resume"] == metrics["rollouts/resumed"]
    assert {e.reason for e in run.trace if e.kind == "drop"} <= {r.value for r in DropReason}
    consumed = sum(e.tokens for e in run.trace if e.kind == "consume")
    assert consumed == metrics["tokens/trained"] + metrics["dropped/masked/tokens"]


@every_mode
def test_segments_are_those_of_the_rollouts(mode: str) -> None:
    run = traced(mode, 8)
    traced_segments: dict[str, list[tuple[int, int]]] = {}
    for visit in engine_visits(run.trace):
        traced_segments.setdefault(f"{visit.group}-{visit.sibling}", []).extend(visit.segments)
    checked = 0
    for event in run.events:
        if event.kind in (EventKind.CONSUME, EventKind.DROP):
            for rollout in event.group.rollouts:
                expected = [(s.policy_version, len(s)) for s in rollout.segments]
                assert traced_segments.get(rollout.rollout_id, []) == expected
                checked += len(expected)
    assert checked >= 32


def test_round_trip_through_the_file(tmp_path: Path) -> None:
    events = traced("drop", 10).trace
    assert any(e.reason for e in events) and any(e.segments for e in events)
    file = TraceFile(tmp_path / "trace.jsonl")
    file.write(events[:40])
    file.write(events[40:])
    assert list(trace_events(file.path)) == events
    assert file.num_bytes / len(events) < 45, "compact"


def test_half_a_line_is_no_event_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('["publish",1.5,3]\n["park",2.0,3,0,1,0,5,[[3,')
    assert list(trace_events(path)) == [TraceEvent("publish", 1.5, 3)]
    for wrong in ('{"kind":"park"}', '["park",2.0]', "[", '["park",2.0,3,0,1,0,5,[3]]'):
        path.write_text(f'["publish",1.5,3]\n{wrong}\n')
        with pytest.raises(ValueError, match="trace.jsonl:2: not a trace event"):
            list(trace_events(path))


def test_full_disk_leaves_whole_lines_and_keeps_the_events(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.jsonl")
    trace = Trace(RunClock(lambda: 1.0), file)
    trace.on_weight_sync(1)
    trace.flush()
    for version in range(2, 50):
        trace.on_weight_sync(version)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError):
            trace.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [event.version for event in trace_events(file.path)] == [1]
    trace.flush()
    assert [event.version for event in trace_events(file.path)] == list(range(1, 50))


def test_a_file_is_cut_back_and_one_that_is_off_grows_no_more(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.jsonl")
    file.truncate(0)
    assert not file.path.exists() and file.num_bytes == 0
    first, second = TraceEvent("publish", 1.0, 1), TraceEvent("publish", 2.0, 2)
    file.write([first])
    kept = file.num_bytes
    file.write([second])
    off = TraceFile(file.path, enabled=False)
    off.write([second])
    assert list(trace_events(file.path)) == [first, second]
    off.truncate(kept)
    assert list(trace_events(file.path)) == [first]
    off.truncate(kept + 1000)
    assert file.num_bytes == kept, "a shorter file is not filled with zeros"


@pytest.mark.parametrize("mode", ["partial", "slots", "drop", "ahead"])
@pytest.mark.parametrize("lost_steps", [0, 2])
def test_a_resumed_run_writes_the_trace_of_an_uninterrupted_one(tmp_path: Path, mode: str, lost_steps: int) -> None:
    straight = traced(mode, 9)
    file = TraceFile(tmp_path / "trace.jsonl")
    first = TracedRun(file, **MODES[mode])
    first.steps(4)
    saved = first.save()
    first.steps(lost_steps)  # after the checkpoint, and killed
    first.tracing.flush()
    second = TracedRun(file, **MODES[mode])
    second.load(saved)
    file.truncate(second.tracing.resumes_at)
    second.steps(5)
    second.tracing.flush()
    assert list(trace_events(file.path)) == straight.trace


@pytest.mark.parametrize("after_events", [3, 17, 40])
def test_a_checkpoint_in_the_middle_of_a_step(tmp_path: Path, after_events: int) -> None:
    """Ctrl-C: what happened since the last step is in the checkpoint, so it stays in the trace, once."""
    file = TraceFile(tmp_path / "trace.jsonl")
    first = TracedRun(file, **MODES["partial"])
    first.steps(2)
    stopped_in_the_middle(first, after_events)
    saved = first.save()
    second = TracedRun(file, **MODES["partial"])
    second.load(saved)
    file.truncate(second.tracing.resumes_at)
    second.steps(4)
    second.tracing.flush()
    events = list(trace_events(file.path))
    assert [e.seconds for e in events] == sorted(e.seconds for e in events), "the clock goes on"
    assert sum(e.tokens for e in events if e.kind in ("park", "finish")) == second.ledger.generated_tokens
    finished = Counter((e.group, e.sibling) for e in events if e.kind == "finish")
    assert max(finished.values()) == 1
    assert Counter(e.kind for e in events)["admit"] == second.ledger.admitted_groups


def test_a_stay_under_several_versions_is_cut_by_tokens() -> None:
    def visit(*segments: tuple[int, int]) -> EngineVisit:
        return EngineVisit(0, 0, 0, 0, 10.0, 20.0, 7, segments, resumed=False, parked=False, dropped=False)

    assert visit((3, 5)).bars() == [(3, 5, 10.0, 20.0)]
    assert visit((3, 5), (4, 3), (5, 2)).bars() == [(3, 5, 10.0, 15.0), (4, 3, 15.0, 18.0), (5, 2, 18.0, 20.0)]
    assert visit().bars() == [(7, 0, 10.0, 20.0)]


def test_busy_share() -> None:
    now = [0.0]
    trace = Trace(RunClock(lambda: now[0]))
    with trace.span("generate"):
        trace.events.append(TraceEvent("start", 0.0, 0, 0, 0))
        trace.events.append(TraceEvent("start", 0.0, 0, 0, 1))
        trace.events.append(TraceEvent("finish", 5.0, 0, 0, 0, tokens=5, segments=((0, 5),)))
        trace.events.append(TraceEvent("finish", 10.0, 0, 0, 1, tokens=9, segments=((0, 9),)))
        now[0] = 10.0
    with trace.span("train"):
        now[0] = 99.0
    assert busy_share(trace.events) == pytest.approx(0.75)
    # With overlap one of the two slots is busy for 4 s beside the training: 19 of 2 * 14 slot-seconds.
    trace.events.append(TraceEvent("start", 20.0, 0, 1, 0))
    trace.events.append(TraceEvent("finish", 24.0, 0, 1, 0, tokens=4, segments=((1, 4),)))
    assert busy_share(trace.events) == pytest.approx(19 / 28)
    assert busy_share([]) != busy_share([])


def test_who_is_at_work_and_for_how_long() -> None:
    """An agent before its first call, tools between turns, one that is done, and those that are given up."""
    lines = [
        ("begin", 0.0, 0, 0), ("begin", 0.5, 0, 1), ("open", 2.0, 0, 0), ("open", 2.0, 0, "0.1.0"),
        ("act", 3.0, 0, 0), ("act", 3.5, 0, "0.1.0"), ("answer", 4.0, 0, 0), ("restart", 5.0, 0, 0),
        ("begin", 5.0, 0, 0), ("finish", 6.0, 0, 0), ("begin", 6.0, 1, 0), ("drop", 7.0, 1, None),
        ("open", 8.0, 0, 1), ("act", 9.0, 2, 0),
    ]  # fmt: skip
    events = [TraceEvent(kind, at, 0, group, sibling) for kind, at, group, sibling in lines]
    found = [(a.group, a.sibling, a.lane, a.start, a.end, a.goes_on) for a in acts(events)]
    assert found == [
        (0, 0, 0, 0.0, 2.0, True), (0, 0, 0, 3.0, 4.0, True), (0, 0, 0, 5.0, 6.0, False), (0, 1, 1, 0.5, 8.0, True)
    ]  # fmt: skip
    slices = [e for e in perfetto(events)["traceEvents"] if e.get("cat") == "acting"]
    assert [(e["name"], e["tid"], e["dur"]) for e in slices] == [
        ("0-0", 0, 2e6), ("0-0", 0, 1e6), ("0-0", 0, 1e6), ("0-1", 1, 7.5e6)
    ]  # fmt: skip
    assert "4 times: environments and agents worked 11.5 s, 7.5 at most" in summary("run", events)


def test_svg_distinguishes_parked_from_acting() -> None:
    lines = [
        ("start", 0.0),
        ("act", 1.0),
        ("answer", 2.0),
        ("resume", 3.0),
        ("park", 4.0),
        ("resume", 5.0),
        ("finish", 6.0),
    ]
    svg = draw([("run", [TraceEvent(kind, at, 0, 0, 0, 0, 1, ((0, 1),)) for kind, at in lines])])
    drawn = svg.partition("policy version")[0]  # the legend has one of each
    assert drawn.count('<line class="acts"') == drawn.count('<line class="over"') == 1
