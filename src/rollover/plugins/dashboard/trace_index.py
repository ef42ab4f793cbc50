"""The trace of a run, paired up as it grows: which rollout had which slot when, what the loop did, and where the events
of a group lie.

    trace.jsonl ──only what is new──▶ bars, acts, spans, publications, drops (numbers) ──group──▶ its events (again)

Owns what is known of a trace without reading it again: some 60 bytes a segment. A file that was cut back, as where
a run goes on from a checkpoint, is read from its beginning. Lines become numbers without a TraceEvent in between where
there are many of them: those of rollouts that get a slot and leave it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollover.files import MOST_ROW_BYTES, check_line, open_regular
from rollover.plugins.dashboard.numbers import WordIndex, structured
from rollover.rollout.lifecycle import EventKind
from rollover.track.trace import BEGINS_VISIT, ENDS_VISIT, PUBLISH, Acts, Span, Spans, TraceEvent, Visits, bars_of

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
# An environment or an agent was at work for a rollout. `lane`: the smallest one that was free then.
ACT = np.dtype([("start", "f8"), ("end", "f8"), ("group", "i8"), ("sibling", "i4"), ("lane", "i4")])
# A group that was dropped. `reason`: a place in `reasons`.
DROP = np.dtype([("seconds", "f8"), ("group", "i8"), ("reason", "i4"), ("tokens", "i8")])
PUBLISHED = np.dtype([("seconds", "f8"), ("version", "i4")])
_CHUNK, _BLOCK = 1 << 18, 1 << 12  # objects of a chunk, or a block, that live long cost a collection each
_DROP, _CONSUME, _PARK, _RESUME, _ACT, _FINISH = (
    kind.value
    for kind in (
        EventKind.DROP,
        EventKind.CONSUME,
        EventKind.PARK,
        EventKind.RESUME,
        EventKind.ACT,
        EventKind.FINISH,
    )
)


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
            self._blocks.append(structured(self._new, self._dtype))
            self._new = []


class TraceIndex:
    """Of the file at `path`, which may not be there (yet), and grow. Call `look` before anything else is asked.

    `seconds`: of the last event. `siblings`, `reasons`: the words that numbers stand for. `consumed`: the groups that
    left for training. `patience`: seconds that a look may take; it takes in one chunk of the file at least,
    and `share` says how much of the file that makes.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.patience = path, float("inf")
        self._forget()

    def _forget(self) -> None:
        self._end, self._last, self._number = 0, b"", 0
        self.seconds, self.share = 0.0, 1.0
        self.siblings, self.reasons = WordIndex(), WordIndex()
        self.consumed: set[int] = set()
        self._bars, self._acts = _Numbers(BAR), _Numbers(ACT)
        self._drops, self._published = _Numbers(DROP), _Numbers(PUBLISHED)
        self._of_loop: list[Span] = []
        self._visits, self._at_work, self._spans = Visits(), Acts(), Spans()
        # Of each group where its first line begins, and its last one ends.
        self._begins: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def look(self) -> None:
        """Read what was written since, as far as patience goes. ValueError names a line that is no event."""
        until = time.monotonic() + self.patience
        try:
            with open_regular(self.path) as file:
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) != self._last:  # cut back meanwhile, and perhaps written on
                    self._forget()
                    file.seek(0)
                left, whole_file = b"", True
                while chunk := file.read(_CHUNK):
                    whole, newline, left = (left + chunk).rpartition(b"\n")
                    if newline:
                        self._add_lines(whole)
                    check_line(left, self.path, MOST_ROW_BYTES)
                    if time.monotonic() >= until and len(chunk) == _CHUNK:
                        whole_file = False
                        break
                size = file.seek(0, 2)
                self.share = 1.0 if whole_file or not size else min(self._end / size, 0.999)
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
            (start, self.seconds, group, self._sibling(sibling), engine, slot, version, 0, RESUMED if resumed else 0)
            for (group, sibling), (start, version, engine, slot, resumed) in self._visits.running.items()
        ]
        return np.array(rows, BAR)

    def acts(self) -> np.ndarray:
        """An array of ACT, in the order of their ends; what is at work at the last event comes behind them."""
        at_work = [
            (start, self.seconds, group, self._sibling(sibling), lane)
            for (group, sibling), (start, lane) in self._at_work.begun.items()
        ]
        return np.concatenate([self._acts.array(), np.array(at_work, ACT)])

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
        """All events of a group and its rollouts, in order, those too that no look has come to yet. Nothing of one that
        is not known."""
        begin, end = self._begins.get(group, self._end), self._ends.get(group, self._end)
        if begin == end and self.share == 1:
            return
        with open_regular(self.path) as file:
            file.seek(begin)
            yield from _of_group(file.read(end - begin), group)
            if self.share < 1:
                file.seek(self._end)
                left = b""
                while chunk := file.read(_CHUNK):
                    whole, newline, left = (left + chunk).rpartition(b"\n")
                    yield from _of_group(whole + newline, group)

    # Private

    def _add_lines(self, whole: bytes) -> None:
        lines = whole.split(b"\n")
        try:
            told = json.loads(b"[" + whole.replace(b"\n", b",") + b"]")  # a call for each line takes thrice that
        except (ValueError, RecursionError):
            told = []
        one_each = len(told) == len(lines)
        for place, line in enumerate(lines):
            begin, self._end = self._end, self._end + len(line) + 1
            try:
                self._add(told[place] if one_each else json.loads(line), begin)
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                where = f"{self.path}:{self._number + place + 1}"
                raise ValueError(f"{where}: not a trace event ({error}): restore the file") from error
        self._last, self._number = lines[-1] + b"\n", self._number + len(lines)

    def _add(self, values: Any, begin: int) -> None:
        """What a line says as JSON that begins at this place of the file."""
        if not isinstance(values, list) or len(values) not in (3, 7, 8):
            raise ValueError("not an array of 3, 7 or 8 values")
        kind, seconds = values[0], values[1]
        if seconds > self.seconds:
            self.seconds = seconds
        if len(values) == 3:
            self._add_of_loop(TraceEvent(*values))
            return
        group, sibling = values[3], values[4]
        self._begins.setdefault(group, begin)
        self._ends[group] = self._end
        if kind in BEGINS_VISIT:
            self._visits.begin((group, sibling), seconds, values[2], values[5], kind == _RESUME)
        elif kind in ENDS_VISIT:
            self._end_visit(kind, seconds, group, sibling, values[7] if len(values) == 8 else ())
            if kind == _ACT or (kind == _FINISH and self._at_work.begun):
                self._add_of_group(TraceEvent.from_values(values))
        elif kind == _CONSUME:
            self.consumed.add(group)
        else:
            self._add_of_group(TraceEvent.from_values(values))

    def _end_visit(self, kind: str, seconds: float, group: int, sibling: int | str, segments: Sequence[Any]) -> None:
        begun = self._visits.end((group, sibling))
        if begun is None:
            return
        start, at_version, engine, slot, resumed = begun
        word, how = self._sibling(sibling), RESUMED if resumed else 0
        bars = bars_of(segments, at_version, start, seconds)
        last = len(bars) - 1
        for place, (version, tokens, begins, ends) in enumerate(bars):
            if place == last and kind == _PARK:
                how |= PARKED
            self._bars.add((begins, ends, group, word, engine, slot, version, tokens, how))
            how = 0

    def _add_of_loop(self, event: TraceEvent) -> None:
        if event.kind == PUBLISH:
            self._published.add((event.seconds, event.version))
        elif (span := self._spans.add(event)) is not None:
            self._of_loop.append(span)

    def _add_of_group(self, event: TraceEvent) -> None:
        assert event.group is not None
        if (act := self._at_work.add(event)) is not None:
            self._acts.add((act.start, act.end, event.group, self._sibling(event.sibling), act.lane))
        if event.kind == _DROP:
            self._visits.release_group(event.group)
            self._drops.add((event.seconds, event.group, self.reasons.number(event.reason), event.tokens))

    def _sibling(self, sibling: int | str | None) -> int:
        """The place of its name."""
        return self.siblings.number(str(sibling or 0))


def _of_group(text: bytes, group: int) -> Iterator[TraceEvent]:
    """Of whole lines the events of this group: most of them are not even cut apart."""
    wanted, at = b",%d," % group, 0
    while (at := text.find(wanted, at)) >= 0:
        begin, end = text.rfind(b"\n", 0, at) + 1, text.index(b"\n", at)
        if (event := TraceEvent.from_line(text[begin:end])).group == group:
            yield event
        at = end
