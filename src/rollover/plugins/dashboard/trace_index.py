"""Index of a trace, updated as the file grows: slots of rollouts, phases of the loop, offsets of a group's events.

    trace.jsonl ──only new lines──▶ bars, acts, spans, weight syncs, drops (numbers) ──group──▶ its events (read again)

Takes some 60 bytes per segment. A truncated file, as after a resume, is read from its start. Frequent lines (visits of
rollouts) become numbers directly, without a TraceEvent.
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

# Tokens of one policy version during a visit of a rollout to a slot. `sibling`: code of `siblings`. `tokens`: 0 without
# samples. `how`: RESUMED, PARKED.
BAR = np.dtype(
    [
        ("start", "f8"), ("end", "f8"), ("group", "i8"), ("sibling", "i4"), ("engine", "i4"), ("slot", "i4"),
        ("version", "i4"), ("tokens", "i4"), ("how", "u1"),
    ]
)  # fmt: skip
RESUMED, PARKED = 1, 2
"""Bits of `how`: the rollout was interrupted before the bar; it was interrupted at its end, and rolls over."""
# Work of an environment or agent for a rollout. `lane`: the smallest free one at its start.
ACT = np.dtype([("start", "f8"), ("end", "f8"), ("group", "i8"), ("sibling", "i4"), ("lane", "i4")])
# A dropped group. `reason`: code of `reasons`.
DROP = np.dtype([("seconds", "f8"), ("group", "i8"), ("reason", "i4"), ("tokens", "i8")])
PUBLISHED = np.dtype([("seconds", "f8"), ("version", "i4")])
_CHUNK, _BLOCK = 1 << 18, 1 << 12  # small: long-lived objects of a chunk or block cost garbage collections
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
    """Growing array of a dtype."""

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
    """Index of the trace at `path`, which may be missing or growing. Call `look` before reading.

    `seconds`: of the last event. `siblings`, `reasons`: words of the codes. `consumed`: trained groups. `patience`:
    seconds that a look may take, with at least one chunk of the file. `share`: share of the file that is read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.patience = path, float("inf")
        self._reset()

    def _reset(self) -> None:
        self._end, self._last, self._number = 0, b"", 0
        self.seconds, self.share = 0.0, 1.0
        self.siblings, self.reasons = WordIndex(), WordIndex()
        self.consumed: set[int] = set()
        self._bars, self._acts = _Numbers(BAR), _Numbers(ACT)
        self._drops, self._published = _Numbers(DROP), _Numbers(PUBLISHED)
        self._of_loop: list[Span] = []
        self._visits, self._at_work, self._spans = Visits(), Acts(), Spans()
        # By group: offset of its first line, and end of its last one.
        self._begins: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def look(self) -> None:
        """Read new lines, as far as patience goes; ValueError names an invalid line."""
        until = time.monotonic() + self.patience
        try:
            with open_regular(self.path) as file:
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) != self._last:  # truncated meanwhile, and perhaps extended
                    self._reset()
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
            self._reset()
        except ValueError:
            self._reset()  # start again after a partly read file
            raise

    def bars(self) -> np.ndarray:
        """Return complete bars as BAR, in the order of their ends."""
        return self._bars.array()

    def open_bars(self) -> np.ndarray:
        """Return running rollouts as BAR with 0 tokens and the trainer's version at their start."""
        rows = [
            (start, self.seconds, group, self._sibling(sibling), engine, slot, version, 0, RESUMED if resumed else 0)
            for (group, sibling), (start, version, engine, slot, resumed) in self._visits.running.items()
        ]
        return np.array(rows, BAR)

    def acts(self) -> np.ndarray:
        """Return ACT in the order of their ends, followed by the open ones."""
        at_work = [
            (start, self.seconds, group, self._sibling(sibling), lane)
            for (group, sibling), (start, lane) in self._at_work.begun.items()
        ]
        return np.concatenate([self._acts.array(), np.array(at_work, ACT)])

    def spans(self) -> Sequence[Span]:
        """Complete spans of the loop, in the order of their ends."""
        return self._of_loop

    def open_spans(self) -> list[Span]:
        """Open spans at the last event."""
        begun = self._spans.begun.items()
        return [Span(name, begin.version, begin.seconds, self.seconds) for name, begin in begun]

    def published(self) -> np.ndarray:
        """Return the weight syncs as PUBLISHED."""
        return self._published.array()

    def drops(self) -> np.ndarray:
        """Return the dropped groups as DROP, in order."""
        return self._drops.array()

    def events_of(self, group: int) -> Iterator[TraceEvent]:
        """Yield all events of a group and its rollouts, in order, also from the unread part of the file."""
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

    def _add_lines(self, whole: bytes) -> None:
        lines = whole.split(b"\n")
        try:
            values = json.loads(b"[" + whole.replace(b"\n", b",") + b"]")  # a call per line takes three times longer
        except (ValueError, RecursionError):
            values = []
        one_each = len(values) == len(lines)
        for place, line in enumerate(lines):
            begin, self._end = self._end, self._end + len(line) + 1
            try:
                self._add(values[place] if one_each else json.loads(line), begin)
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                where = f"{self.path}:{self._number + place + 1}"
                raise ValueError(f"{where}: not a trace event ({error}): restore the file") from error
        self._last, self._number = lines[-1] + b"\n", self._number + len(lines)

    def _add(self, values: Any, begin: int) -> None:
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
        return self.siblings.number(str(sibling or 0))


def _of_group(text: bytes, group: int) -> Iterator[TraceEvent]:
    """Yield the events of a group from complete lines, parsing only lines with its number."""
    wanted, at = b",%d," % group, 0
    while (at := text.find(wanted, at)) >= 0:
        begin, end = text.rfind(b"\n", 0, at) + 1, text.index(b"\n", at)
        if (event := TraceEvent.from_line(text[begin:end])).group == group:
            yield event
        at = end
