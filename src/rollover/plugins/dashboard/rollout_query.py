"""Selection of recorded rollouts: filters, sort order, pages, text search.

The names of the filters are those in the page's address. Numeric filters apply to all rollouts at once. A text search
reads blocks in sort order until the page is full or the time is up; the answer says how far it read, and the next query
continues there. The search ignores case. It reads a JSONL line up to its tokens, and decodes a line only if the bytes
of an ASCII text occur in it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollover.files import line_of, open_regular
from rollover.plugins.dashboard.numbers import number
from rollover.plugins.dashboard.query import NotFound, Query, count, names_in, real
from rollover.plugins.dashboard.rollout_index import (
    NO_VERSION,
    RolloutIndex,
    rollout_id,
    short_line,
    staleness,
    versions,
)
from rollover.text import encodable
from rollover.track.parquet import read_columns
from rollover.types import content_text

MOST_ROWS, MOST_CONTEXTS = 500, 500
_BLOCK = 1000
_SEARCH_S = 1.0
EXCERPT = 200

_Values = Callable[[np.ndarray], np.ndarray]
NUMBERS: dict[str, _Values] = {
    "step": lambda e: e["step"],
    "score": lambda e: e["score"],
    "advantage": lambda e: e["advantage"],
    "tokens": lambda e: e["num_tokens"],
    "segments": lambda e: e["segments"],
    "version": lambda e: versions(e, "newest"),
    "versions": lambda e: np.where(e["oldest"] == NO_VERSION, 0, e["newest"] - e["oldest"] + 1),
    "staleness": staleness,
    "group": lambda e: e["group_id"],
    "sibling": lambda e: e["sibling"],
}
"""Values for ranges (`score_from`, `score_to`) and sorting. "version": newest sampled version; "versions": span."""
WORDS = {"outcome": "outcome", "source": "source", "stop": "stop"}
"""Filters by words (`names_in`), with their fields of an entry."""
_OTHERS = ("text", "sort", "order", "offset", "limit", "scored")


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Filters, order and page. `low`, `high`: by names of NUMBERS, inclusive. `words`: by names of WORDS. `scored`:
    with a score (True) or without (False). `sort`: "" is the order of leaving the run. `offset`: among the rollouts
    that pass numbers and words."""

    low: Mapping[str, float] = field(default_factory=dict)
    high: Mapping[str, float] = field(default_factory=dict)
    words: Mapping[str, frozenset[str]] = field(default_factory=dict)
    scored: bool | None = None
    text: str = ""
    sort: str = ""
    descending: bool = False
    offset: int = 0
    limit: int = 50

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> RolloutFilter:
        """Parse a query; ValueError for an unknown filter or an invalid value."""
        known = {f"{name}_{end}" for name in NUMBERS for end in ("from", "to")} | {*WORDS, *_OTHERS}
        if unknown := sorted(query.keys() - known):
            raise ValueError(f"{unknown[0]}: there is no such filter; there are {', '.join(sorted(known))}")
        given = {key: value for key, value in query.items() if value != ""}
        sort, order, scored = given.get("sort", ""), given.get("order", "up"), given.get("scored")
        if sort and sort not in NUMBERS:
            raise ValueError(f"sort: {sort!r} is not one of {', '.join(NUMBERS)}")
        if order not in ("up", "down"):
            raise ValueError(f"order: {order!r} is neither up nor down")
        if scored not in (None, "yes", "no"):
            raise ValueError(f"scored: {scored!r} is neither yes nor no")
        return cls(
            low=_bounds(given, "from"),
            high=_bounds(given, "to"),
            words={name: frozenset(names_in(given[name])) for name in WORDS if name in given},
            scored=None if scored is None else scored == "yes",
            text=given.get("text", ""),
            sort=sort,
            descending=order == "down",
            offset=count(given, "offset", 0),
            limit=count(given, "limit", 50, MOST_ROWS),
        )

    def places(self, index: RolloutIndex, entries: np.ndarray) -> np.ndarray:
        """Return the places of `entries` that pass numbers and words, sorted; missing values come last."""
        chosen = np.ones(len(entries), bool)
        for name, bound in self.low.items():
            chosen &= NUMBERS[name](entries) >= bound  # nan does not pass
        for name, bound in self.high.items():
            chosen &= NUMBERS[name](entries) <= bound
        for name, words in self.words.items():
            numbers = [number for number, word in enumerate(index.words) if word in words]
            chosen &= np.isin(entries[WORDS[name]], numbers)
        if self.scored is not None:
            chosen &= np.isnan(entries["score"]) != self.scored
        places = np.flatnonzero(chosen)
        if not self.sort:
            return places[::-1] if self.descending else places
        values = NUMBERS[self.sort](entries[places]).astype(np.float64)
        return places[np.argsort(-values if self.descending else values, kind="stable")]


def page(
    index: RolloutIndex, wanted: RolloutFilter, search_s: float = _SEARCH_S, clock: Callable[[], float] = time.monotonic
) -> dict[str, Any]:
    """Return the "rows" of a page; "total": recorded rollouts, "passed": those that pass numbers and words.

    "next": offset of the next page, None after the last. "searched": with a text, the number of rollouts read for this
    page, which may have fewer rows than the limit. "read": share of the run's files that are read. A row's "contexts":
    rollouts of its episode. ValueError for a damaged or missing file.
    """
    entries = index.entries()
    places = wanted.places(index, entries)
    left = places[wanted.offset :]
    searched = None
    if wanted.text:
        shown, searched = _with_text(index, entries, left, wanted, search_s, clock)
        after = wanted.offset + searched
    else:
        shown = left[: wanted.limit]
        after = wanted.offset + len(shown)
    chosen = entries[np.array(shown, np.int64)]
    rows = [row_of(index, entry, record) for entry, record in zip(chosen, index.records_of(chosen), strict=True)]
    for row, contexts in zip(rows, _contexts(entries, np.array(shown, np.int64)), strict=True):
        row["contexts"] = contexts
    return {
        "rows": rows,
        "total": len(entries),
        "passed": len(places),
        "offset": wanted.offset,
        "next": after if after < len(places) else None,
        "searched": searched,
        "read": index.share,
    }


def _contexts(entries: np.ndarray, places: np.ndarray) -> list[int]:
    """Count the entries of each one's episode (step, group and sibling)."""
    episode = ["step", "group_id", "sibling"]
    wanted = entries[episode][places]
    counts = Counter(entries[episode][np.isin(entries["group_id"], wanted["group_id"])].tolist())
    return [counts[of] for of in wanted.tolist()]


def _with_text(
    index: RolloutIndex,
    entries: np.ndarray,
    left: np.ndarray,
    wanted: RolloutFilter,
    search_s: float,
    clock: Callable[[], float],
) -> tuple[list[int], int]:
    """Return (places with the text, number of places read)."""
    search, until, shown, read = TextSearch(index, wanted.text), clock() + search_s, [], 0
    while read < len(left) and len(shown) < wanted.limit and (not read or clock() < until):
        block = left[read : read + _BLOCK]
        has = search.matches(entries[block])
        hits = np.flatnonzero(has)[: wanted.limit - len(shown)]
        shown += [int(block[hit]) for hit in hits]
        full = len(shown) == wanted.limit
        read += int(hits[-1]) + 1 if full else len(block)
    return shown, read


def row_of(index: RolloutIndex, entry: np.void, record: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a row of a list, with excerpts of prompt and answer if its `record` is given."""
    row = {
        "id": rollout_id(entry),
        "step": int(entry["step"]),
        "group": int(entry["group_id"]),
        "sibling": int(entry["sibling"]),
        "score": number(entry["score"]),
        "advantage": number(entry["advantage"]),
        "tokens": int(entry["num_tokens"]),
        "segments": int(entry["segments"]),
        "oldest": number(float(versions(entry, "oldest"))),
        "newest": number(float(versions(entry, "newest"))),
        "staleness": int(staleness(entry)),
        "outcome": index.word(entry["outcome"]),
        "source": index.word(entry["source"]),
        "stop": index.word(entry["stop"]),
    }
    if record is not None:
        row |= {"asked": question(record)[:EXCERPT], "answered": record["completion"][:EXCERPT]}
    return row


def question(record: Mapping[str, Any]) -> str:
    """Return the text of the last message, or the prompt."""
    if record["messages"]:
        return content_text(record["messages"][-1].get("content"))
    return record["prompt"] or ""


def choices(index: RolloutIndex) -> dict[str, Any]:
    """Return the choices of the filters: words with counts, least and largest value of each number."""
    entries = index.entries()
    found: dict[str, Any] = {"total": len(entries), "words": {}, "numbers": {}}
    for name, of in WORDS.items():
        numbers, counts = np.unique(entries[of], return_counts=True)
        found["words"][name] = {index.word(n): int(num) for n, num in zip(numbers, counts, strict=True)}
    for name, values_of in NUMBERS.items():
        values = values_of(entries).astype(np.float64)
        if len(values := values[~np.isnan(values)]):
            found["numbers"][name] = [number(values.min()), number(values.max())]
    return found


def _bounds(given: Query, end: str) -> dict[str, float]:
    found = {name: real(given, f"{name}_{end}") for name in NUMBERS}
    return {name: bound for name, bound in found.items() if bound is not None}


def episode(index: RolloutIndex, step: int, group: int, sibling: int) -> dict[str, Any]:
    """Return episode `sibling` of a group; NotFound without it.

    "contexts": its rollouts in the order of trajectories and contexts, as list rows with "role" and rewards of "turns";
    "of": their number.
    """
    entries = index.entries()
    of_episode = (entries["step"] == step) & (entries["group_id"] == group) & (entries["sibling"] == sibling)
    places = np.flatnonzero(of_episode)
    if not len(places):
        raise NotFound(f"no episode {group}-{sibling} left the run with step {step}")
    places = places[np.lexsort((entries["context"][places], entries["trajectory"][places]))]
    contexts, shown = [], entries[places[:MOST_CONTEXTS]]
    for entry, record in zip(shown, index.records_of(shown), strict=True):
        contexts.append(
            {
                **row_of(index, entry, record),
                "trajectory": int(entry["trajectory"]),
                "context": int(entry["context"]),
                "role": record.get("role") or "",
                "turns": record.get("turns"),
                "error": record.get("error"),
            }
        )
    return {"group": group, "sibling": sibling, "step": step, "of": len(places), "contexts": contexts}


_OWN, _OF_GROUP = ("rollout_id", "task_id", "completion"), ("prompt", "messages")


class TextSearch:
    """Search for `text` in recorded rollouts. Caches for each group whether its prompt matches."""

    def __init__(self, index: RolloutIndex, text: str) -> None:
        self.index = index
        self._wanted = _folded(text)
        self._as_json = (
            json.dumps(text, ensure_ascii=False)[1:-1].lower().encode() if text.isascii() else b""
        )  # bytes.lower() changes ASCII only
        self._prompts: dict[tuple[Path, int], bool] = {}

    def matches(self, entries: np.ndarray) -> np.ndarray:
        """Return [entry] bool; ValueError for a missing file."""
        found = np.zeros(len(entries), bool)
        for file in np.unique(entries["file"]):
            of_file = np.flatnonzero(entries["file"] == file)
            path = self.index.path(entries[int(of_file[0])])
            try:
                look = self._rows if path.suffix == ".parquet" else self._lines
                found[of_file] = look(path, entries[of_file])
            except (OSError, ValueError, IndexError) as error:
                raise ValueError(f"{path}: it cannot be searched any more ({error}): look again") from error
        return found

    def _lines(self, path: Path, entries: np.ndarray) -> list[bool]:
        with open_regular(path) as file:

            def at(place: int) -> bytes:
                file.seek(place)
                return line_of(file, path)

            return [
                self._in_line(at(int(entry["place"])), _OWN) or self._of_group(path, int(entry["head"]), at)
                for entry in entries
            ]

    def _of_group(self, path: Path, head: int, at: Any) -> bool:
        if (path, head) not in self._prompts:
            self._prompts[path, head] = self._in_line(at(head), _OF_GROUP)
        return self._prompts[path, head]

    def _in_line(self, line: bytes, keys: Sequence[str]) -> bool:
        return self._as_json in line.lower() and self._in_record(short_line(line), keys)

    def _rows(self, path: Path, entries: np.ndarray) -> list[bool]:
        columns = read_columns(path, (*_OWN, *_OF_GROUP))

        def record(row: int) -> dict[str, Any]:
            of = {key: values[row] for key, values in columns.items()}
            return of | {"messages": of["messages"] and json.loads(of["messages"])}

        return [self._in_record(record(int(entry["place"])), (*_OWN, *_OF_GROUP)) for entry in entries]

    def _in_record(self, record: Mapping[str, Any], keys: Sequence[str]) -> bool:
        return any(self._wanted in _folded(text) for key in keys for text in _texts(record[key]))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a value: of a string or of chat messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for message in value:
            parts = [part for key, part in message.items() if key != "role"]
            yield from (part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts)


def _folded(text: str) -> str:
    return encodable(text).lower()
