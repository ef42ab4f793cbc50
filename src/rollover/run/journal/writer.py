"""Writes what happens to rollouts into the journal. docs/checkpoint-format.md lists every record.

    Lifecycle ──▶ on_event ──record──▶ Journal          Engine.progress ──▶ progress (new tokens of what runs)
    the loop ──▶ on_step, on_row, on_published ────┘

Owns how much of every running rollout the journal has. Never decides what happens, and never reads: replay.py does.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollover.checkpoint.journal import Journal, Mark
from rollover.rollout.lifecycle import Event, EventKind
from rollover.types import Prompt, Rollout, RolloutState, Segment

TOKENS, STEP, ROW, PUBLISH, ROLL_BACK = "tokens", "step", "row", "publish", "roll_back"
_BEGINS = (EventKind.START, EventKind.RESUME)
_ENDS = (EventKind.PARK, EventKind.ACT, EventKind.FINISH)


@dataclass(slots=True)
class _Told:
    """What the journal has of a running rollout: tokens `started` to `num`, with this digest."""

    started: int
    num: int
    digest: int = 0


class JournalWriter:
    """Writes to `journal`. `clock` gives the run's seconds; `task_version` the version that a new task was made for.

    `seconds`: spent on writing, cumulative.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float], task_version: Callable[[], int]) -> None:
        self.journal, self.clock, self.task_version = journal, clock, task_version
        self.seconds = 0.0
        self._told: dict[Rollout, _Told] = {}  # of the running rollouts

    def begin(self, checkpoint: str | None) -> Mark:
        """Begin a new file: see Journal.begin. To be called when nothing runs."""
        self._told.clear()
        with self.timed():
            return self.journal.begin(checkpoint)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the seconds of a block as spent on the journal."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    def on_event(self, event: Event) -> None:
        """Write what happened to a group or a rollout: a listener of Lifecycle."""
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
                self._told[rollout] = _Told(rollout.num_tokens, rollout.num_tokens)
                fields["version"] = event.version
            elif kind in _ENDS or kind is EventKind.ANSWER:
                if rollout in self._told:
                    new, data = self._new(rollout, rollout.segments, 0)
                    del self._told[rollout]
                else:  # it did not run: its environment was at work
                    start = rollout.num_tokens - sum(map(len, event.written))
                    segments, data = _beyond(event.written, start, start)
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
        self._write(kind.value, fields, data)
        self.seconds += time.perf_counter() - started

    def _fields_of_group(self, event: Event) -> dict[str, Any]:
        fields: dict[str, Any] = {"group": event.group.group_id, "version": event.version}
        if event.kind is EventKind.ADMIT:
            task = event.group.task
            fields |= {"task": task.task_id, "attempt": task.attempt, "task_version": self.task_version()}
            fields["prompt"] = digest_of(event.group.prompt)
        elif event.kept is not None:
            fields |= dict(zip(("sibling", "name", "value"), event.kept, strict=True))
        elif event.reason is not None:
            fields |= {"reason": event.reason.value, "filter": event.filter}
        return fields

    @property
    def running(self) -> list[str]:
        """The ids of the running rollouts; none where no journal is written."""
        return [rollout.rollout_id for rollout in self._told] if self.journal.writes else []

    def progress(self, found: Mapping[str, Sequence[Segment]]) -> None:
        """Write the new tokens of running rollouts. `found`: what Engine.progress said; some may have ended since."""
        started = time.perf_counter()
        running = {rollout.rollout_id: rollout for rollout in self._told}
        for rollout_id, segments in found.items() if self.journal.writes else ():
            rollout = running.get(rollout_id)
            if rollout is None or segments[0].start not in (None, rollout.num_tokens):
                continue  # it ended meanwhile, or goes on from there
            if rollout.num_tokens + sum(map(len, segments)) <= self._told[rollout].num:
                continue  # nothing new; fewer, if its engine failed and was asked again
            fields, data = self._new(rollout, segments, rollout.num_tokens)
            self._write(TOKENS, {"rollout": rollout_id, **fields}, data)
        self.seconds += time.perf_counter() - started

    def on_step(self, version: int) -> None:
        """The step at trainer `version` has trained what was consumed for it."""
        with self.timed():
            self._write(STEP, {"version": version})

    def on_row(self, version: int, trace_bytes: int) -> None:
        """The row of the step that led to trainer `version` is written, and so is the trace up to `trace_bytes`."""
        with self.timed():
            self._write(ROW, {"version": version, "trace_bytes": trace_bytes})
            self.journal.sync()

    def on_published(self, version: int) -> None:
        """The weights of the trainer's `version` are live."""
        with self.timed():
            self._write(PUBLISH, {"version": version})

    def on_roll_back(self) -> None:
        """The steps since the checkpoint are lost, and what they wrote is cut off now: they are never trained again."""
        self._write(ROLL_BACK, {})

    def _new(self, rollout: Rollout, segments: Sequence[Segment], start: int) -> tuple[dict[str, Any], bytes]:
        """What of `segments`, which begin with token `start` of a running rollout, the journal has not yet.

        All since it was started, "anew", if that is not what the journal has: an engine that failed was asked again.
        """
        told = self._told[rollout]
        anew = told.num > told.started and _digest(segments, start, told.started, told.num) != told.digest
        fields, data = _beyond(segments, start, told.started if anew else told.num)
        told.num = start + sum(map(len, segments))
        told.digest = _digest(segments, start, told.started, told.num)
        return {"segments": fields, "anew": anew}, data

    def _write(self, kind: str, fields: Mapping[str, Any], data: bytes = b"") -> None:
        self.journal.append({"kind": kind, "seconds": round(self.clock(), 6), **fields}, data)


def digest_of(prompt: Prompt) -> int:
    """A checksum by which a replay notices that a task has another prompt now, to which its tokens are no answer."""
    media = "".join(media.digest for media in prompt.media)
    return zlib.crc32(media.encode(), zlib.crc32(np.asarray(prompt.ids, "<i4").tobytes()))


def _beyond(segments: Sequence[Segment], start: int, known: int) -> tuple[list[dict[str, Any]], bytes]:
    """What of consecutive segments, the first of which begins with token `start`, comes after the first `known` tokens.

    (Fields of each piece, as Segment.to_json, with its number of tokens; token ids int32 and log-probs float32 of all.)
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
    """The checksum of tokens `first` to `end`, their log-probs and versions. `segments` begin with token `start`."""
    crc = 0
    for segment in segments:
        cut = slice(max(first - start, 0), max(end - start, 0))
        ids, logprobs = segment.token_ids[cut], segment.logprobs[cut]
        rows = np.stack([ids.astype(np.float64), logprobs, np.full(len(ids), segment.policy_version)], axis=1)
        crc = zlib.crc32(rows.tobytes(), crc)
        start += segment.num_tokens
    return crc


def pieces(fields: Sequence[Mapping[str, Any]], data: bytes) -> Iterator[Segment]:
    """The segments of a record: the inverse of what was written of them."""
    num = sum(of["num_tokens"] for of in fields)
    ids = np.frombuffer(data, "<i4", num).astype(np.int32)
    logprobs = np.frombuffer(data, "<f4", num, offset=4 * num).astype(np.float32)
    at = 0
    for of in fields:
        end = at + of["num_tokens"]
        yield Segment.from_json(of, ids[at:end], logprobs[at:end])
        at = end
