"""The trace of a run: what happened to every rollout and when. docs/trace.md describes trace.jsonl line by line.

    Lifecycle ──▶ Trace.on_event ────────────TraceEvent──▶ TraceFile             (trace.jsonl)
    the loop ──▶ Trace.span, Trace.on_published ────┘         └──▶ engine_visits, spans  (picture, Perfetto, summary)

Owns the events, their lines, and how they are paired up again. The clock is the run's, or a planner's virtual one.
Never decides anything, and nothing is decided by it. No torch, no event loop.
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
    is the embedded one. `tokens`, sampled ones: start and resume: so far; park, act and finish: since the start or
    resume before (answer, and finish after act: 0); ready, consume, drop: the whole group's. `segments`: (policy
    version, tokens) of what park, act and finish add. `reason`: of a drop.
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
        """Compact JSON array, without line end. Microseconds are kept."""
        values: list[object] = [self.kind, round(self.seconds, 6), self.version]
        if self.group is not None:
            values += [self.group, self.sibling, self.engine, self.tokens]
        if self.segments or self.reason:
            values.append(self.segments or self.reason)
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> TraceEvent:
        """The inverse of `to_line`. Raises ValueError for anything else."""
        return cls.from_values(json.loads(line))

    @classmethod
    def from_values(cls, values: object) -> TraceEvent:
        """Of what a line says as JSON. ValueError for what no line says."""
        if not isinstance(values, list) or len(values) not in (3, 7, 8):
            raise ValueError("not an array of 3, 7 or 8 values")
        if len(values) < 8:
            return cls(*values)
        *first, last = values
        if isinstance(last, str):
            return cls(*first, reason=last)
        return cls(*first, segments=tuple([(version, tokens) for version, tokens in last]))


class Trace(Tracker):
    """A reader of Lifecycle's events: collects their lines in memory, in the order of their happening, and adds them to
    `file` once a step. Without a `file` they stay in memory. `clock`: that of the events.
    """

    def __init__(self, clock: RunClock, file: TraceFile | None = None) -> None:
        self.clock = clock
        self.events: list[TraceEvent] = []
        self.resumes_at = 0  # size of the file in bytes where the run goes on
        self._file = file
        self._segments_before: dict[str, int] = {}  # of what runs

    def on_event(self, event: Event) -> None:
        """A listener of Lifecycle."""
        kind, group, rollout = event.kind.value, event.group, event.rollout
        if event.kind in (EventKind.SCORE, EventKind.KEEP):
            return  # scores are told with the group: ready, or drop
        if event.kind is EventKind.GIVE_BACK:  # it was not consumed after all: no line of the file says so yet
            untold = (EventKind.CONSUME.value, group.group_id)
            self.events = [e for e in self.events if (e.kind, e.group) != untold]
            return
        segments: tuple[tuple[int, int], ...] = ()
        if rollout is None:
            tokens = sum(r.num_sampled_tokens for r in group.rollouts)
        elif kind in BEGINS_VISIT:
            self._segments_before[rollout.rollout_id] = len(rollout.segments)
            tokens = rollout.num_sampled_tokens
        else:
            # Without a visit before it, its environment was at work: it wrote something that no policy sampled.
            new = rollout.segments[self._segments_before.pop(rollout.rollout_id, len(rollout.segments)) :]
            segments = tuple((s.policy_version, len(s)) for s in new if s.trainable)
            tokens = sum(n for _, n in segments)
        sibling = None if rollout is None else _sibling(rollout)
        reason = "" if event.reason is None else event.reason.value
        now, version = event.seconds, event.trainer_version
        self.events.append(TraceEvent(kind, now, version, group.group_id, sibling, 0, tokens, segments, reason))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """The loop does something for a while: "generate", "train". Spans of one name do not overlap. While the clock
        stands nothing is recorded: a span would have no length."""
        if self.clock.paused:
            yield
            return
        self.events.append(TraceEvent(name + SPAN_START, self.clock.seconds(), self.clock.version))
        try:
            yield
        finally:
            self.events.append(TraceEvent(name + SPAN_END, self.clock.seconds(), self.clock.version))

    def on_published(self, version: int) -> None:
        """The engine samples with the weights of `version` from now on. Called before anything is dropped for it."""
        self.events.append(TraceEvent(PUBLISH, self.clock.seconds(), version))

    def drain(self) -> list[TraceEvent]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    # Its file

    def on_step(self, row: Row) -> None:
        self.flush()

    def truncate(self, cut: Cut) -> None:
        """Cut the file to its size at `cut`, which may be in the middle of a step: `resumes_at`."""
        if self._file is not None:
            self._file.truncate(self.resumes_at)

    @property
    def num_bytes(self) -> int:
        """The size of the file now."""
        return 0 if self._file is None else self._file.num_bytes

    def flush(self) -> None:
        """Write the new events."""
        if self._file is not None:
            self._file.write(self.events)
            self.drain()  # not before: events that could not be written are written with the next ones

    def sync(self) -> int:
        """Write the new events to the disk. Returns the size of the file, to which a run that resumes here cuts it."""
        self.flush()
        if self._file is not None:
            self._file.sync()
        return self.num_bytes

    def resume_at(self, num_bytes: int) -> None:
        """The run goes on where the file had this size: what is not in it is forgotten."""
        self.drain()
        self.resumes_at = num_bytes


def _sibling(rollout: Rollout) -> int | str:
    """The number of its Episode; of the further Rollouts of one, their places in it as well: "3.0.1"."""
    place = rollout.rollout_id.partition("-")[2]
    return rollout.sibling if place == str(rollout.sibling) else place


class TraceFile:
    """trace.jsonl: append-only, cut back to a checkpoint's size when a run resumes from it.

    `enabled` False: nothing is added, but what an earlier process of the run wrote stays and is cut like the rest.
    """

    def __init__(self, path: str | Path, enabled: bool = True) -> None:
        self.path, self.enabled = Path(path), enabled

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def write(self, events: Iterable[TraceEvent]) -> None:
        """Append; readers see all of them at once. After an OSError the file is as it was before."""
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
        """Return when every line is on disk: before a checkpoint that counts on them."""
        self._change(None)

    def truncate(self, num_bytes: int) -> None:
        """Forget what was written beyond the first `num_bytes`."""
        self._change(num_bytes)

    def _change(self, num_bytes: int | None) -> None:
        if self.path.exists():
            with naming(self.path), open(self.path, "ab") as file:
                if num_bytes is not None and num_bytes < self.num_bytes:
                    file.truncate(num_bytes)
                os.fsync(file.fileno())


def trace_events(path: str | Path) -> Iterator[TraceEvent]:
    """The events of a trace.jsonl, read as they are wanted; half a line, left by a killed writer, is none.

    ValueError names a wrong line.
    """
    with open_regular(path) as file:
        for number, line in enumerate(lines_of(file, path, MOST_ROW_BYTES), start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield TraceEvent.from_line(line)
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: not a trace event ({error}): restore the file") from error


# What the events say together


class EngineVisit(NamedTuple):
    """What one rollout did on an engine from one start or resume to the park, act or finish after it.

    `slot`: the engine's smallest one that was free then. `resumed`: it had been interrupted before. `parked`: it was
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
    """(policy version, tokens, start, end) of each segment of a visit; one of 0 tokens if there is none.

    The trace knows when a visit began and ended, not when weights changed in the middle of it: there the time is split
    in proportion to the tokens.
    """
    if len(segments) < 2:
        ((version, tokens),) = segments or [(trainer_version, 0)]
        return [(version, tokens, start, end)]
    total, seen, cuts = sum(n for _, n in segments), 0, [start]
    for _, tokens in segments[:-1]:
        seen += tokens
        cuts.append(start + (end - start) * seen / total)
    return [(v, n, a, b) for (v, n), a, b in zip(segments, cuts, [*cuts[1:], end], strict=True)]


class Span(NamedTuple):
    """The loop was doing `name` at trainer version `version`. Times in seconds."""

    name: str
    version: int
    start: float
    end: float


_Key = tuple[int | None, int | str | None]  # a rollout: its group, and its name in that
Begun = tuple[float, int, int, int, bool]


class Visits:
    """Which rollout is in which slot, by what begins and ends.

    `running`: of each rollout in a slot, since when it is, the trainer's version then, engine, slot, and whether it had
    been interrupted before.
    """

    def __init__(self) -> None:
        self.running: dict[_Key, Begun] = {}
        self._free: dict[int, list[int]] = {}
        self._num_slots: dict[int, int] = {}

    def begin(self, rollout: _Key, seconds: float, version: int, engine: int, resumed: bool) -> None:
        """It has got a slot: the engine's smallest free one. A visit of it that has no end, as its process was killed
        meanwhile, is forgotten."""
        if rollout in self.running:
            self.end(rollout)
        if free := self._free.get(engine):
            slot = heapq.heappop(free)
        else:
            slot = self._num_slots.get(engine, 0)
            self._num_slots[engine] = slot + 1
        self.running[rollout] = seconds, version, engine, slot, resumed

    def end(self, rollout: _Key) -> Begun | None:
        """It left its slot: how that visit began. None where it was in none."""
        begun = self.running.pop(rollout, None)
        if begun is not None:
            heapq.heappush(self._free.setdefault(begun[2], []), begun[3])
        return begun

    def give_up(self, group: int) -> None:
        """The group left: none of its rollouts is in a slot any more."""
        for rollout in [rollout for rollout in self.running if rollout[0] == group]:
            self.end(rollout)


def engine_visits(events: Sequence[TraceEvent]) -> list[EngineVisit]:
    """In order of their ends. What ran when the trace began or broke off is left out."""
    visits, found = Visits(), []
    dropped = {e.group for e in events if e.kind == EventKind.DROP.value}
    for event in events:
        rollout = (event.group, event.sibling)
        if event.kind in BEGINS_VISIT:
            visits.begin(rollout, event.seconds, event.version, event.engine, event.kind == EventKind.RESUME.value)
        elif event.kind == EventKind.DROP.value and event.group is not None:
            visits.give_up(event.group)
        elif event.kind in ENDS_VISIT and (begun := visits.end(rollout)) is not None:
            start, version, engine, slot, resumed = begun
            assert event.group is not None and event.sibling is not None
            where, when = (event.group, event.sibling, engine, slot), (start, event.seconds)
            how = resumed, event.kind == EventKind.PARK.value, event.group in dropped
            found.append(EngineVisit(*where, *when, version, event.segments, *how))
    return found


class Act(NamedTuple):
    """A turn of a rollout had ended, and its environment, or its agent, was at work; an agent is before its first call,
    too. `lane`: the smallest one that was free then. `goes_on`: the policy had another turn. Times in seconds."""

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
    """Pairs events up to acts, as they come. `begun`: of what is at work since when, and in which lane."""

    def __init__(self) -> None:
        self.begun: dict[_Key, tuple[float, int]] = {}
        self._free: list[int] = []

    def add(self, event: TraceEvent) -> Act | None:
        """The act that the event ends, if it ends one."""
        rollout = (event.group, event.sibling)
        if event.kind in (EventKind.RESTART.value, EventKind.DROP.value):
            for given_up in [key for key in self.begun if _is_of(key, event)]:
                heapq.heappush(self._free, self.begun.pop(given_up)[1])
        elif event.kind in _BEGINS_ACT and rollout not in self.begun:
            self.begun[rollout] = event.seconds, heapq.heappop(self._free) if self._free else len(self.begun)
        elif event.kind in _ENDS_ACT and rollout in self.begun:
            start, lane = self.begun.pop(rollout)
            heapq.heappush(self._free, lane)
            return Act(*rollout, lane, start, event.seconds, event.kind != EventKind.FINISH.value)
        return None


def acts(events: Sequence[TraceEvent]) -> list[Act]:
    """In order of their ends. What was at work when the trace ended, or was given up, is left out."""
    pairing = Acts()
    return [act for event in events if (act := pairing.add(event)) is not None]


def _is_of(rollout: _Key, event: TraceEvent) -> bool:
    """Whether the event is about the rollout's Episode, or its whole group."""
    group, sibling = rollout
    return group == event.group and event.sibling in (None, sibling, int(str(sibling).partition(".")[0]))


class Spans:
    """Pairs events of the loop up to spans, as they come."""

    def __init__(self) -> None:
        self.begun: dict[str, TraceEvent] = {}

    def add(self, event: TraceEvent) -> Span | None:
        """The span that the event ends, if it ends one."""
        if event.kind.endswith(SPAN_START):
            self.begun[event.kind.removesuffix(SPAN_START)] = event
        elif event.kind.endswith(SPAN_END) and (begin := self.begun.pop(event.kind.removesuffix(SPAN_END), None)):
            return Span(event.kind.removesuffix(SPAN_END), begin.version, begin.seconds, event.seconds)
        return None


def spans(events: Sequence[TraceEvent]) -> list[Span]:
    """In order of their ends. One that was cut off by the end of a process is left out."""
    pairing = Spans()
    return [span for event in events if (span := pairing.add(event)) is not None]


def busy_share(events: Sequence[TraceEvent]) -> float:
    """Share of the slots' time that a rollout ran in, while something was generated; NaN if nothing ever was.

    Slots: as many per engine as ever ran at once. The time: when the loop waits for rollouts, or (with rollout.overlap)
    some run beside the training.
    """
    visits = engine_visits(events)
    num_slots = len({(s.engine, s.slot) for s in visits})
    generating = [(s.start, s.end) for s in spans(events) if s.name == "generate"]
    available = num_slots * _covered(generating + [(s.start, s.end) for s in visits])
    return sum(s.end - s.start for s in visits) / available if available else float("nan")


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Seconds that at least one of them covers."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
