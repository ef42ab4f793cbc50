"""The trace of a run, paired up as it grows: which rollout had which slot when, what the loop did, and where the events
of a group lie.

    trace.jsonl ──only what is new──▶ bars, spans, publications, drops (numbers) ──group──▶ its events (read again)

Owns what is known of a trace without reading it again: some 60 bytes a segment. A file that was cut back, as where
a run goes on from a checkpoint, is read from its beginning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollover.rollout.lifecycle import EventKind
from rollover.track.trace import PUBLISH, EngineVisit, Span, Spans, TraceEvent, Visits

# What one policy version sampled of a rollout while that was in a slot of an engine. `sibling`: a place in `siblings`.
# `tokens`: 0 where nothing was sampled. `how`: RESUMED, PARKED.
BAR = np.dtype(
    [
        ("start", "f8"), ("end", "f8"), ("group", "i8"), ("sibling", "i4"), ("engine", "i4"), ("slot", "i4"),
        ("version", "i4"), ("tokens", "i4"), ("how", "u1"),
    ]
)  # fmt: skip
RESUMED, PARKED = 1, 2
"""Of a bar's `how`: the rollout had been interrupted before it; it was interrupted at the end of it, and rolls over."""
# A group that was dropped. `reason`: a place in `reasons`.
DROP = np.dtype([("seconds", "f8"), ("group", "i8"), ("reason", "i4"), ("tokens", "i8")])
PUBLISHED = np.dtype([("seconds", "f8"), ("version", "i4")])
_CHUNK, _BLOCK = 1 << 18, 1 << 12  # objects of a chunk, or a block, that live long cost a collection each
_DROP, _CONSUME = EventKind.DROP.value, EventKind.CONSUME.value


class _Numbers:
    """Rows of a dtype: as many as there are, in one array."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype, self._blocks, self._new = dtype, [np.zeros(0, dtype)], []

    def add(self, row: tuple[Any, ...]) -> None:
        self._new.append(row)
        if len(self._new) == _BLOCK:
            self._close_block()

    def array(self) -> np.ndarray:
        self._close_block()
        if len(self._blocks) > 1:
            self._blocks = [np.concatenate(self._blocks)]
        return self._blocks[0]

    def _close_block(self) -> None:
        if self._new:
            self._blocks.append(np.array(self._new, self._dtype))
            self._new = []


class TraceIndex:
    """Of the file at `path`, which may not be there (yet), and grow. Call `look` before anything else is asked.

    `seconds`: of the last event. `siblings`, `reasons`: the words that numbers stand for. `consumed`: the groups that
    left for training.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._end, self._last, self._number = 0, b"", 0
        self.seconds = 0.0
        self.siblings: list[str] = []
        self.reasons: list[str] = []
        self.consumed: set[int] = set()
        self._word_at: dict[tuple[str, str], int] = {}
        self._bars, self._drops, self._published = _Numbers(BAR), _Numbers(DROP), _Numbers(PUBLISHED)
        self._of_loop: list[Span] = []
        self._visits, self._spans = Visits(), Spans()
        self._lies: dict[int, tuple[int, int]] = {}  # group: where its first line begins, and its last one ends

    def look(self) -> None:
        """Read what was written since. ValueError names a line that is no event."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) != self._last:  # cut back meanwhile, and perhaps written on
                    self._forget()
                    file.seek(0)
                left = b""
                while chunk := file.read(_CHUNK):
                    whole, newline, left = (left + chunk).rpartition(b"\n")
                    if newline:
                        self._add_lines(whole.split(b"\n"))
        except FileNotFoundError:
            self._forget()
        except ValueError:
            self._forget()  # half of what a file says is nothing to go on from
            raise

    def bars(self) -> np.ndarray:
        """An array of BAR, in the order of their ends; what runs now is in `open_bars`."""
        return self._bars.array()

    def open_bars(self) -> np.ndarray:
        """What runs at the last event, as BAR: of 0 tokens, and of the trainer's version at its start."""
        rows = [
            (begin.seconds, self.seconds, begin.group, self._word("sibling", str(begin.sibling)), begin.engine, slot,
             begin.version, 0, RESUMED if begin.kind == EventKind.RESUME.value else 0)
            for begin, slot in self._visits.running.values()
        ]  # fmt: skip
        return np.array(rows, BAR)

    def spans(self) -> Sequence[Span]:
        """What the loop did, in the order of the ends."""
        return self._of_loop

    def open_spans(self) -> list[Span]:
        """What the loop does at the last event."""
        begun = self._spans.begun.items()
        return [Span(name, begin.version, begin.seconds, self.seconds) for name, begin in begun]

    def published(self) -> np.ndarray:
        """An array of PUBLISHED: from when on each version was sampled from."""
        return self._published.array()

    def drops(self) -> np.ndarray:
        """An array of DROP, in order."""
        return self._drops.array()

    def events_of(self, group: int) -> Iterator[TraceEvent]:
        """All events of a group and its rollouts, in order. Nothing of one that is not known."""
        begin, end = self._lies.get(group, (0, 0))
        if begin == end:
            return
        with open(self.path, "rb") as file:
            file.seek(begin)
            wanted = b",%d," % group
            for line in file:
                begin += len(line)
                if begin > end:
                    return
                if wanted in line and (event := TraceEvent.from_line(line)).group == group:
                    yield event

    # Private

    def _add_lines(self, lines: list[bytes]) -> None:
        try:
            told = json.loads(b"[" + b",".join(lines) + b"]")  # a call for each line takes thrice that
            events = [TraceEvent.from_values(values) for values in told]
        except (ValueError, TypeError):
            events = []
        if len(events) != len(lines):
            events = [self._event(line, place) for place, line in enumerate(lines, start=1)]
        for event, line in zip(events, lines, strict=True):
            self._add(event, len(line) + 1)
        self._last, self._number = lines[-1] + b"\n", self._number + len(lines)

    def _event(self, line: bytes, place: int) -> TraceEvent:
        try:
            return TraceEvent.from_line(line)
        except (ValueError, TypeError) as error:
            where = f"{self.path}:{self._number + place}"
            raise ValueError(f"{where}: not a trace event ({error}): restore the file") from error

    def _add(self, event: TraceEvent, length: int) -> None:
        begin, self._end = self._end, self._end + length
        self.seconds = max(self.seconds, event.seconds)
        if event.group is None:
            if event.kind == PUBLISH:
                self._published.add((event.seconds, event.version))
            elif (span := self._spans.add(event)) is not None:
                self._of_loop.append(span)
            return
        self._lies[event.group] = self._lies.get(event.group, (begin, begin))[0], self._end
        if event.kind == _DROP:
            reason = self._word("reason", event.reason)
            self._drops.add((event.seconds, event.group, reason, event.tokens))
        elif event.kind == _CONSUME:
            self.consumed.add(event.group)
        elif (visit := self._visits.add(event)) is not None:
            self._add_visit(visit)

    def _add_visit(self, visit: EngineVisit) -> None:
        sibling, bars = self._word("sibling", str(visit.sibling)), visit.bars()
        for place, (version, tokens, start, end) in enumerate(bars):
            how = (RESUMED if visit.resumed and place == 0 else 0) | (
                PARKED if visit.parked and place == len(bars) - 1 else 0
            )
            self._bars.add((start, end, visit.group, sibling, visit.engine, visit.slot, version, tokens, how))

    def _word(self, kind: str, word: str) -> int:
        words = self.siblings if kind == "sibling" else self.reasons
        if (kind, word) not in self._word_at:
            self._word_at[kind, word] = len(words)
            words.append(word)
        return self._word_at[kind, word]
