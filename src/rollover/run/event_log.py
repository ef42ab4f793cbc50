"""The event log: writes every event of a run as a record of its journal, which resume.py replays.

    Lifecycle ──▶ on_event ───────────────────────────┐
    the loop ──▶ on_step, on_row, on_weight_sync ──┼──record──▶ Journal (checkpoint/journal.py: the files)
    Engine.progress, every checkpoint.journal_s ──────┘

A killed run loses at most the last checkpoint.journal_s seconds of running rollouts. Owns how much of every running
rollout the journal has, and when it is synced to disk. Never reads. docs/checkpoint-format.md lists every record.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rollover.checkpoint.journal import Journal, JournalFile, Mark
from rollover.checkpoint.mirror import Mirror
from rollover.engine.validate import resumable_segments
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Event, EventKind, RunClock
from rollover.track.jsonl import MetricsFile
from rollover.types import Prompt, Rollout, RolloutState, Segment

TOKENS, STEP, ROW, PUBLISH, ROLL_BACK = "tokens", "step", "row", "publish", "roll_back"
_BEGINS = (EventKind.START, EventKind.RESUME)
_ENDS = (EventKind.PARK, EventKind.ACT, EventKind.FINISH)


@dataclass(slots=True)
class _Journaled:
    """The tokens of a running rollout that the journal has: `started` to `num`, with their digest."""

    started: int
    num: int
    digest: int = 0


class HasVersion(Protocol):
    """`version`: the trainer's, for the next task."""

    version: int


class EventLog:
    """Writes the events of a run to `journal`.

    `generates`: whether the run's groups pass the lifecycle; others are not journaled. `every_s`: checkpoint.journal_s;
    0 turns the journal off. `mirror`: copies the files at the same interval. `is_on`: whether a journal is written;
    `seconds`: time spent on writing, cumulative.
    """

    def __init__(
        self,
        journal: Journal,
        clock: RunClock,
        prompts: HasVersion,
        *,
        generates: bool = True,
        every_s: float = 0.0,
        mirror: Mirror | None = None,
    ) -> None:
        self.journal, self.clock, self.prompts, self.generates = journal, clock, prompts, generates
        self.every_s, self.is_on = every_s, generates and every_s > 0
        self.seconds = 0.0
        self._mirror = mirror
        self._journaled: dict[Rollout, _Journaled] = {}  # of the running rollouts
        self._timer: Timer | None = None

    # Files

    def begin_file(self, checkpoint: str | None) -> Mark | None:
        """Begin a new file while nothing runs: at a checkpoint, or (None) at the start of the run.

        Returns its mark, where --resume begins to read; None if the journal is off.
        """
        if not self.is_on:
            return None
        self._journaled.clear()
        with self._timed():
            return self.journal.begin(checkpoint)

    def start(self, driver: Driver) -> None:
        """Write the new tokens of running rollouts every `every_s` seconds, if the journal is on."""
        if self.is_on:
            self._timer = Timer(self.every_s, lambda: self._write_progress(driver), self._sync)
            self._timer.start()

    def counters(self) -> dict[str, float]:
        """Return the counters of the journal and of the mirror."""
        counters: dict[str, float] = {}
        if self.is_on:
            counters |= {"journal/failed": self.journal.failed, "journal/cut_bytes": self.journal.cut_bytes}
        if self._mirror is not None:
            counters["mirror/failed"] = self._mirror.failed
        return counters

    def close(self) -> None:
        """End the timer, the journal and the mirror."""
        with ExitStack() as rest:  # each of them, even if another fails
            if self._mirror is not None:
                rest.callback(self._mirror.close)
            rest.callback(self.journal.close)
            if self._timer is not None:
                self._timer.close()

    # Events

    def on_event(self, event: Event) -> None:
        """Write an event of Lifecycle."""
        if not self.journal.writes:
            return
        started = time.perf_counter()
        kind, rollout = event.kind, event.rollout
        data = b""
        if rollout is None:
            fields = self._fields_of_group(event)
        else:
            fields: dict[str, Any] = {"rollout": rollout.rollout_id}
            if kind in _BEGINS:
                self._journaled[rollout] = _Journaled(rollout.num_tokens, rollout.num_tokens)
                fields["version"] = event.version
            elif kind in _ENDS or kind is EventKind.ANSWER:
                if rollout in self._journaled:
                    new, data = self._new(rollout, rollout.segments, 0)
                    del self._journaled[rollout]
                else:  # it is not running: its environment was
                    start = rollout.num_tokens - sum(map(len, event.written))
                    segments, data = _encode_after(event.written, start, start)
                    new = {"segments": segments, "anew": False}
                fields |= new | {"num_tokens": rollout.num_tokens}
                fields["stop_reason"] = rollout.stop_reason and rollout.stop_reason.value
            elif kind is EventKind.OPEN:
                fields |= {"role": rollout.role, "trajectory": rollout.trajectory, "context": rollout.context}
                fields |= {"group": rollout.group_id, "sibling": rollout.sibling, "key": rollout.turn_key}
                fields |= rollout.prompt.media_to_json()
                data = np.asarray(rollout.prompt.ids, "<i4").tobytes()
            elif kind is EventKind.RESTART:
                fields |= {"group": rollout.group_id, "sibling": rollout.sibling}
            elif kind is EventKind.CUT:
                fields["num_tokens"] = rollout.num_tokens if rollout.state is RolloutState.ACTING else 0
            elif rollout.reward is not None and kind is EventKind.SCORE:
                fields["reward"] = rollout.reward.to_json()
        self._write(kind.value, fields, data, event.seconds)
        self.seconds += time.perf_counter() - started

    def _fields_of_group(self, event: Event) -> dict[str, Any]:
        fields: dict[str, Any] = {"group": event.group.group_id, "version": event.version}
        if event.kind is EventKind.ADMIT:
            task = event.group.task
            fields |= {"task": task.task_id, "attempt": task.attempt, "task_version": self.prompts.version}
            fields["prompt"] = digest_of(event.group.prompt)
        elif event.kept is not None:
            fields |= dict(zip(("sibling", "name", "value"), event.kept, strict=True))
        elif event.reason is not None:
            fields |= {"reason": event.reason.value, "filter": event.filter}
        return fields

    @property
    def running(self) -> list[str]:
        """The ids of the running rollouts; [] if the journal is off."""
        return [rollout.rollout_id for rollout in self._journaled] if self.journal.writes else []

    def progress(self, found: Mapping[str, Sequence[Segment]]) -> None:
        """Write the new tokens of running rollouts. `found`: from Engine.progress; some may have ended since."""
        started = time.perf_counter()
        running = {rollout.rollout_id: rollout for rollout in self._journaled}
        for rollout_id, segments in found.items() if self.journal.writes else ():
            rollout = running.get(rollout_id)
            if rollout is None or segments[0].start not in (None, rollout.num_tokens):
                continue  # it has ended, or was resumed, meanwhile
            if rollout.num_tokens + sum(map(len, segments)) <= self._journaled[rollout].num:
                continue  # nothing new; fewer tokens, if its engine failed and generates them again
            fields, data = self._new(rollout, segments, rollout.num_tokens)
            self._write(TOKENS, {"rollout": rollout_id, **fields}, data)
        self.seconds += time.perf_counter() - started

    def on_step(self, version: int) -> None:
        """Write that the step at trainer `version` has trained the consumed groups."""
        with self._timed():
            self._write(STEP, {"version": version})

    def on_row(self, version: int, metrics: MetricsFile, trace_bytes: int) -> None:
        """Write that the row of the step that led to trainer `version` is in `metrics`.

        `trace_bytes`: size of the trace now. Raises the error that ended the timer, if any.
        """
        if self.journal.writes:
            with self._timed():
                metrics.sync()  # the row must be on the disk before this record
                self._write(ROW, {"version": version, "trace_bytes": trace_bytes})
                self.journal.sync()
        if self._timer is not None:
            self._timer.check()

    def on_weight_sync(self, version: int) -> None:
        """Write that the engine has the weights of the trainer's `version`."""
        with self._timed():
            self._write(PUBLISH, {"version": version})

    def roll_back(self, file: JournalFile) -> None:
        """Write at the end of `file`, the last one, that its steps are lost: no later start trains them again."""
        self.journal.resume(file)
        self._write(ROLL_BACK, {})
        self.journal.halt()

    # Private

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the seconds of the block as spent on the journal."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    async def _write_progress(self, driver: Driver) -> None:
        found = await driver.retrying_engine.progress(self.running)
        cache = driver.lifecycle.cache
        for rollout in cache.running():
            room = cache.remaining(rollout.rollout_id)
            if believed := resumable_segments(found.get(rollout.rollout_id, ()), rollout.num_tokens, room):
                self.progress({rollout.rollout_id: believed})

    def _sync(self) -> None:
        self.journal.sync()
        if self._mirror is not None:
            self._mirror.beat()

    def _new(self, rollout: Rollout, segments: Sequence[Segment], start: int) -> tuple[dict[str, Any], bytes]:
        """Return (fields, data) of tokens that the journal lacks. `segments` begin with token `start` of the rollout.

        Where the journal has other tokens, because an engine failed and generated them again: all tokens since the
        rollout was started or resumed, marked "anew".
        """
        journaled = self._journaled[rollout]
        differs = (
            journaled.num > journaled.started
            and _digest(segments, start, journaled.started, journaled.num) != journaled.digest
        )
        fields, data = _encode_after(segments, start, journaled.started if differs else journaled.num)
        journaled.num = start + sum(map(len, segments))
        journaled.digest = _digest(segments, start, journaled.started, journaled.num)
        return {"segments": fields, "anew": differs}, data

    def _write(self, kind: str, fields: Mapping[str, Any], data: bytes = b"", seconds: float | None = None) -> None:
        seconds = self.clock.seconds() if seconds is None else seconds
        self.journal.append({"kind": kind, "seconds": round(seconds, 6), **fields}, data)


class Timer:
    """A background task that calls `write`, and then `sync`, every `every_s` seconds from `start` on.

    While a slow `write` runs, `sync` is still called, and `write` is not called again: an engine that does not report
    its progress must not delay the disk.
    """

    def __init__(
        self, every_s: float, write: Callable[[], Coroutine[Any, Any, None]], sync: Callable[[], None]
    ) -> None:
        self.every_s, self.write, self.sync = every_s, write, sync
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._write_periodically())

    def check(self) -> None:
        """Raise the error that ended it, if any."""
        if self._task is not None and self._task.done():
            self._task.result()

    def close(self) -> None:
        if self._task is not None:
            _end(self._task)

    async def _write_periodically(self) -> None:
        writing: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(self.every_s)
                writing = _unfinished(writing) or asyncio.ensure_future(self.write())
                await asyncio.wait([writing], timeout=self.every_s)
                writing = _unfinished(writing)
                self.sync()
        finally:
            if writing is not None:
                _end(writing)


def _unfinished(task: asyncio.Task[None] | None) -> asyncio.Task[None] | None:
    """Return the task while it runs, else None. Raises its error."""
    if task is None or not task.done():
        return task
    return task.result()


def _end(task: asyncio.Task[None]) -> None:
    """Cancel it. Its error is not logged again: it has ended the run."""
    if not task.cancel() and not task.cancelled():
        task.exception()


def digest_of(prompt: Prompt) -> int:
    """Return a checksum of the prompt, by which a replay detects that a task has another prompt now."""
    media = "".join(media.digest for media in prompt.media)
    return zlib.crc32(media.encode(), zlib.crc32(np.asarray(prompt.ids, "<i4").tobytes()))


def _encode_after(segments: Sequence[Segment], start: int, known: int) -> tuple[list[dict[str, Any]], bytes]:
    """Encode the tokens after the first `known` ones of consecutive segments, which begin with token `start`.

    Returns (Segment.to_json of each piece, with its number of tokens; token ids int32 and log-probs float32 of all).
    """
    fields: list[dict[str, Any]] = []
    ids: list[bytes] = []
    logprobs: list[bytes] = []
    for segment in segments:
        first = max(known - start, 0)
        if first < segment.num_tokens:
            fields.append(segment.to_json() | {"start": start + first, "num_tokens": segment.num_tokens - first})
            ids.append(segment.token_ids[first:].astype("<i4", copy=False).tobytes())
            logprobs.append(segment.logprobs[first:].astype("<f4", copy=False).tobytes())
        start += segment.num_tokens
    return fields, b"".join(ids + logprobs)


def _digest(segments: Sequence[Segment], start: int, first: int, end: int) -> int:
    """Return the checksum of tokens `first` to `end`, their log-probs and versions. `segments` begin at `start`."""
    crc = 0
    for segment in segments:
        cut = slice(max(first - start, 0), max(end - start, 0))
        ids, logprobs = segment.token_ids[cut], segment.logprobs[cut]
        rows = np.stack([ids.astype(np.float64), logprobs, np.full(len(ids), segment.policy_version)], axis=1)
        crc = zlib.crc32(rows.tobytes(), crc)
        start += segment.num_tokens
    return crc
