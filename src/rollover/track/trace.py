"""The trace of a run: what happened to every rollout and when. docs/trace.md describes trace.jsonl line by line.

    Lifecycle ──▶ Trace.on_event ──────────────TraceEvent──▶ TraceFile           (trace.jsonl)
    the loop ──▶ Trace.span, Trace.on_weight_sync ────┘         └──▶ engine_visits, spans  (picture, Perfetto, summary)

Owns the events, their lines, and their pairing. The clock is the run's, or the planner's virtual one. No decision
depends on the trace. No torch, no event loop.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rollover.files import MOST_ROW_BYTES, lines_of, naming, open_regular
from rollover.rollout.lifecycle import Event, EventKind, RunClock
from rollover.track.tracker import Cut, Row, Tracker
from rollover.types import Rollout

TRACE = "trace.jsonl"  # in the run directory
PUBLISH = "publish"
SPAN_START, SPAN_END = "_start", "_end"
BEGINS_VISIT = (EventKind.START.value, EventKind.RESUME.value)
ENDS_VISIT = (EventKind.PARK.value, EventKind.ACT.value, EventKind.FINISH.value)
_BEGINS_ACT = (EventKind.ACT.value, EventKind.BEGIN.value)
_ENDS_ACT = (EventKind.ANSWER.value, EventKind.OPEN.value, EventKind.FINISH.value)


class TraceEvent(NamedTuple):
    """One line of trace.jsonl.

    `kind`: an EventKind's value, `<span>_start`, `<span>_end` or "publish". `seconds`: since the start of the run.
    `version`: the trainer's. `group` is None for events of the loop, `sibling` for those of a whole group. `engine`: 0
    is the embedded one. `tokens`: sampled tokens. start, resume: so far; park, act, finish: since the last start or
    resume (answer, and finish after act: 0); ready, consume, drop: of the whole group. `segments`: (policy version,
    tokens) that park, act and finish add. `reason`: of a drop.
    """

    kind: str
    seconds: float
    version: int
    group: int | None = None
    sibling: int | str | None = None
    engine: int = 0
    tokens: int = 0
    segments: tuple[tuple[int, int], ...] = ()
    reason: str = ""

    def to_line(self) -> str:
        """Return a compact JSON array without line end, with times in microsecond precision."""
        values: list[object] = [self.kind, round(self.seconds, 6), self.version]
        if self.group is not None:
            values += [self.group, self.sibling, self.engine, self.tokens]
        if self.segments or self.reason:
            values.append(self.segments or self.reason)
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> TraceEvent:
        """Parse a line of `to_line`; ValueError for anything else."""
        return cls.from_values(json.loads(line))

    @classmethod
    def from_values(cls, values: object) -> TraceEvent:
        """Convert the JSON value of a line; ValueError for anything else."""
        if not isinstance(values, list) or len(values) not in (3, 7, 8):
            raise ValueError("not an array of 3, 7 or 8 values")
        if len(values) < 8:
            return cls(*values)
        *first, last = values
        if isinstance(last, str):
            return cls(*first, reason=last)
        return cls(*first, segments=tuple([(version, tokens) for version, tokens in last]))


class Trace(Tracker):
    """Tracker that collects the events of Lifecycle and of the loop in memory, and appends them to `file` once per
    step.

    Without a `file` they stay in memory. `clock`: of the events.
    """

    def __init__(self, clock: RunClock, file: TraceFile | None = None) -> None:
        self.clock = clock
        self.events: list[TraceEvent] = []
        self.resumes_at = 0  # size of the file in bytes at the resume point
        self._file = file
        self._segments_before: dict[str, int] = {}  # by running rollout: segments at its start or resume

    def on_event(self, event: Event) -> None:
        kind, group, rollout = event.kind.value, event.group, event.rollout
        if event.kind in (EventKind.SCORE, EventKind.KEEP):
            return  # the group's ready or drop event follows
        if event.kind is EventKind.GIVE_BACK:  # undoes a consume event, which is not written yet
            undone = (EventKind.CONSUME.value, group.group_id)
            self.events = [e for e in self.events if (e.kind, e.group) != undone]
            return
        segments: tuple[tuple[int, int], ...] = ()
        if rollout is None:
            tokens = sum(r.num_sampled_tokens for r in group.rollouts)
        elif kind in BEGINS_VISIT:
            self._segments_before[rollout.rollout_id] = len(rollout.segments)
            tokens = rollout.num_sampled_tokens
        else:
            # Without a visit before it, its environment wrote tokens, which no policy sampled.
            new = rollout.segments[self._segments_before.pop(rollout.rollout_id, len(rollout.segments)) :]
            segments = tuple((s.policy_version, len(s)) for s in new if s.trainable)
            tokens = sum(n for _, n in segments)
        sibling = None if rollout is None else _sibling(rollout)
        reason = "" if event.reason is None else event.reason.value
        now, version = event.seconds, event.trainer_version
        self.events.append(TraceEvent(kind, now, version, group.group_id, sibling, 0, tokens, segments, reason))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record a phase of the loop: "generate", "train". Spans of one name do not overlap.

        Nothing is recorded while the clock stands, because a span would have no length.
        """
        if self.clock.paused:
            yield
            return
        self.events.append(TraceEvent(name + SPAN_START, self.clock.seconds(), self.clock.version))
        try:
            yield
        finally:
            self.events.append(TraceEvent(name + SPAN_END, self.clock.seconds(), self.clock.version))

    def on_weight_sync(self, version: int) -> None:
        """Record that the engine samples with the weights of `version` now; called before the drops that it causes."""
        self.events.append(TraceEvent(PUBLISH, self.clock.seconds(), version))

    def drain(self) -> list[TraceEvent]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    def on_step(self, row: Row) -> None:
        self.flush()

    def truncate(self, cut: Cut) -> None:
        """Truncate the file to `resumes_at`, which may be in the middle of a step."""
        if self._file is not None:
            self._file.truncate(self.resumes_at)

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return 0 if self._file is None else self._file.num_bytes

    def flush(self) -> None:
        """Write the new events."""
        if self._file is not None:
            self._file.write(self.events)
            self.drain()  # only now: after a failed write the events stay for the next one

    def sync(self) -> int:
        """Flush the new events to disk. Returns the size of the file for `resume_at`."""
        self.flush()
        if self._file is not None:
            self._file.sync()
        return self.num_bytes

    def resume_at(self, num_bytes: int) -> None:
        """Set the resume point to this size of the file, and discard the events in memory."""
        self.drain()
        self.resumes_at = num_bytes


def _sibling(rollout: Rollout) -> int | str:
    """Sibling number; for further rollouts of an episode with trajectory and context: "3.0.1"."""
    place = rollout.rollout_id.partition("-")[2]
    return rollout.sibling if place == str(rollout.sibling) else place


class TraceFile:
    """trace.jsonl: append-only, truncated to a checkpoint's size when a run resumes from it.

    `enabled` False: it appends nothing, but still truncates the file of an earlier process of the run.
    """

    def __init__(self, path: str | Path, enabled: bool = True) -> None:
        self.path, self.enabled = Path(path), enabled

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def write(self, events: Iterable[TraceEvent]) -> None:
        """Append events; readers see all of them at once. An OSError leaves the file unchanged."""
        lines = "".join(event.to_line() + "\n" for event in events) if self.enabled else ""
        if not lines:
            return
        before = self.num_bytes
        try:
            with naming(self.path), open(self.path, "ab") as file:
                file.write(lines.encode())
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, before)
            raise

    def sync(self) -> None:
        """Flush every line to disk, before a checkpoint that refers to them."""
        self._change(None)

    def truncate(self, num_bytes: int) -> None:
        """Remove everything after the first `num_bytes`."""
        self._change(num_bytes)

    def _change(self, num_bytes: int | None) -> None:
        if self.path.exists():
            with naming(self.path), open(self.path, "ab") as file:
                if num_bytes is not None and num_bytes < self.num_bytes:
                    file.truncate(num_bytes)
                os.fsync(file.fileno())


def trace_events(path: str | Path) -> Iterator[TraceEvent]:
    """Yield the events of a trace.jsonl. A truncated last line is ignored; ValueError names an invalid line."""
    with open_regular(path) as file:
        for number, line in enumerate(lines_of(file, path, MOST_ROW_BYTES), start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield TraceEvent.from_line(line)
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: not a trace event ({error}): restore the file") from error


class EngineVisit(NamedTuple):
    """One stay of a rollout on an engine, from start or resume to park, act or finish.

    `slot`: the engine's smallest free one at its start. `resumed`: it had been interrupted before. `parked`: it was
    interrupted and rolls over. `dropped`: its group was dropped later. Times in seconds.
    """

    group: int
    sibling: int | str
    engine: int
    slot: int
    start: float
    end: float
    trainer_version: int
    segments: tuple[tuple[int, int], ...]
    resumed: bool
    parked: bool
    dropped: bool

    def bars(self) -> list[tuple[int, int, float, float]]:
        return bars_of(self.segments, self.trainer_version, self.start, self.end)


def bars_of(
    segments: Sequence[tuple[int, int]], trainer_version: int, start: float, end: float
) -> list[tuple[int, int, float, float]]:
    """Return (policy version, tokens, start, end) of each segment of a visit; one bar of 0 tokens without segments.

    The trace does not have the time of a weight sync during a visit: the time is split in proportion to the tokens.
    """
    if len(segments) < 2:
        ((version, tokens),) = segments or [(trainer_version, 0)]
        return [(version, tokens, start, end)]
    total, seen, starts = sum(n for _, n in segments), 0, [start]
    for _, tokens in segments[:-1]:
        seen += tokens
        starts.append(start + (end - start) * seen / total)
    return [(v, n, a, b) for (v, n), a, b in zip(segments, starts, [*starts[1:], end], strict=True)]


class Span(NamedTuple):
    """A phase of the loop at trainer version `version`. Times in seconds."""

    name: str
    version: int
    start: float
    end: float


_Key = tuple[int | None, int | str | None]  # group and sibling of a rollout
Begun = tuple[float, int, int, int, bool]  # start, trainer version, engine, slot, resumed


class Visits:
    """Assignment of rollouts to slots, from the events that begin and end visits. `running`: the open visits."""

    def __init__(self) -> None:
        self.running: dict[_Key, Begun] = {}
        self._free: dict[int, list[int]] = {}
        self._num_slots: dict[int, int] = {}

    def begin(self, rollout: _Key, seconds: float, version: int, engine: int, resumed: bool) -> None:
        """Give it the engine's smallest free slot. An earlier visit without an end (a killed process) is discarded."""
        if rollout in self.running:
            self.end(rollout)
        if free := self._free.get(engine):
            slot = heapq.heappop(free)
        else:
            slot = self._num_slots.get(engine, 0)
            self._num_slots[engine] = slot + 1
        self.running[rollout] = seconds, version, engine, slot, resumed

    def end(self, rollout: _Key) -> Begun | None:
        """Free its slot and return the beginning of the visit, None if it had no slot."""
        begun = self.running.pop(rollout, None)
        if begun is not None:
            heapq.heappush(self._free.setdefault(begun[2], []), begun[3])
        return begun

    def release_group(self, group: int) -> None:
        """Free the slots of all rollouts of the group."""
        for rollout in [rollout for rollout in self.running if rollout[0] == group]:
            self.end(rollout)


def engine_visits(events: Sequence[TraceEvent]) -> list[EngineVisit]:
    """Return the complete visits, in the order of their ends."""
    visits, found = Visits(), []
    dropped = {e.group for e in events if e.kind == EventKind.DROP.value}
    for event in events:
        rollout = (event.group, event.sibling)
        if event.kind in BEGINS_VISIT:
            visits.begin(rollout, event.seconds, event.version, event.engine, event.kind == EventKind.RESUME.value)
        elif event.kind == EventKind.DROP.value and event.group is not None:
            visits.release_group(event.group)
        elif event.kind in ENDS_VISIT and (begun := visits.end(rollout)) is not None:
            start, version, engine, slot, resumed = begun
            assert event.group is not None and event.sibling is not None
            where, when = (event.group, event.sibling, engine, slot), (start, event.seconds)
            how = resumed, event.kind == EventKind.PARK.value, event.group in dropped
            found.append(EngineVisit(*where, *when, version, event.segments, *how))
    return found


class Act(NamedTuple):
    """The work of an environment or agent for a rollout, after a turn; of an agent also before its first call.

    `lane`: the smallest free one at its start. `goes_on`: the policy had another turn. Times in seconds.
    """

    group: int | None
    sibling: int | str | None
    lane: int
    start: float
    end: float
    goes_on: bool

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Acts:
    """Pairs events to acts as they come. `begun`: start and lane of the open acts."""

    def __init__(self) -> None:
        self.begun: dict[_Key, tuple[float, int]] = {}
        self._free: list[int] = []

    def add(self, event: TraceEvent) -> Act | None:
        """Return the act that the event ends, if any."""
        rollout = (event.group, event.sibling)
        if event.kind in (EventKind.RESTART.value, EventKind.DROP.value):
            for cancelled in [key for key in self.begun if _concerns(event, key)]:
                heapq.heappush(self._free, self.begun.pop(cancelled)[1])
        elif event.kind in _BEGINS_ACT and rollout not in self.begun:
            self.begun[rollout] = event.seconds, heapq.heappop(self._free) if self._free else len(self.begun)
        elif event.kind in _ENDS_ACT and rollout in self.begun:
            start, lane = self.begun.pop(rollout)
            heapq.heappush(self._free, lane)
            return Act(*rollout, lane, start, event.seconds, event.kind != EventKind.FINISH.value)
        return None


def acts(events: Sequence[TraceEvent]) -> list[Act]:
    """Return the complete acts, in the order of their ends."""
    pairing = Acts()
    return [act for event in events if (act := pairing.add(event)) is not None]


def _concerns(event: TraceEvent, rollout: _Key) -> bool:
    """Return whether the event is about the rollout's episode, or its whole group."""
    group, sibling = rollout
    return group == event.group and event.sibling in (None, sibling, int(str(sibling).partition(".")[0]))


class Spans:
    """Pairs events of the loop to spans as they come."""

    def __init__(self) -> None:
        self.begun: dict[str, TraceEvent] = {}

    def add(self, event: TraceEvent) -> Span | None:
        """Return the span that the event ends, if any."""
        if event.kind.endswith(SPAN_START):
            self.begun[event.kind.removesuffix(SPAN_START)] = event
        elif event.kind.endswith(SPAN_END) and (begin := self.begun.pop(event.kind.removesuffix(SPAN_END), None)):
            return Span(event.kind.removesuffix(SPAN_END), begin.version, begin.seconds, event.seconds)
        return None


def spans(events: Sequence[TraceEvent]) -> list[Span]:
    """Return the complete spans, in the order of their ends."""
    pairing = Spans()
    return [span for event in events if (span := pairing.add(event)) is not None]


def busy_share(events: Sequence[TraceEvent]) -> float:
    """Return the share of slot time in use during generation, NaN without generation.

    Slots: per engine as many as ever ran at once. Generation: the loop waits for rollouts, or some run during training
    (rollout.overlap).
    """
    visits = engine_visits(events)
    num_slots = len({(s.engine, s.slot) for s in visits})
    generating = [(s.start, s.end) for s in spans(events) if s.name == "generate"]
    available = num_slots * _covered(generating + [(s.start, s.end) for s in visits])
    return sum(s.end - s.start for s in visits) / available if available else float("nan")


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Seconds that at least one interval covers."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
