"""One rollout for the page: what it was asked and answered, which weights sampled which part of that, what it was
worth, who its siblings were, and its life.

Texts are what they are: the page shows them as text and nothing else.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.numbers import numbers
from rollover.plugins.dashboard.query import NotThere
from rollover.plugins.dashboard.rollout_index import find, staleness
from rollover.plugins.dashboard.rollout_query import row_of
from rollover.plugins.dashboard.why import why
from rollover.track.token_stats import KEYS, by_token
from rollover.track.trace import TraceEvent

MOST_TOKENS = 20_000
_AROUND = 16  # tokens
_COPIED = (
    "rollout_id", "group_id", "sibling", "role", "trajectory", "context", "group_size", "task_id", "attempt", "source",
    "reward", "step", "outcome", "messages", "prompt", "media", "later_media", "plain", "columns", "completion",
    "score", "extras", "shaping", "texts", "error", "turns", "advantage", "credit", "stop_reason", "num_tokens",
)  # fmt: skip
Pieces = Callable[[Sequence[int]], list[str] | None]
"""The text of each token, so that together they are the text of all; None where nobody knows it."""


def told(
    files: IndexedRun,
    step: int,
    of: str,
    first: int = 0,
    count: int = 2000,
    pieces: Pieces | None = None,
) -> dict[str, Any]:
    """The rollout of this id that left with `step`, with `count` of its tokens from the `first` on.

    KeyError where there is none. "segments" have their place among the tokens, and how stale each was as the rollout
    left; "tokens": ids, log-probs as they were sampled, and texts, None where `pieces` knows none; "trained" among
    them: what training made of each (track/token_stats.py), None where that is not recorded; "why": sentences on how it
    got its advantage; "resume": what to type to go on from it; "siblings": all rollouts of its group; "life": its own
    events and its group's, [] without a trace.
    """
    index = files.rollouts
    entries = index.entries()
    place = find(entries, step, of)
    if place is None:
        raise NotThere(f"no rollout {of} left the run with step {step}")
    entry = entries[place]
    places = np.flatnonzero((entries["group_id"] == entry["group_id"]) & (entries["step"] == entry["step"]))
    group = entries[places]
    records = index.records_of(group)
    files.trace.look()
    found = told_in_group(files, int(np.flatnonzero(places == place)[0]), group, records, first, count, pieces)
    siblings = [row_of(index, *sibling) for sibling in zip(group, records, strict=True)]
    return found | {"siblings": siblings}


def told_in_group(
    files: IndexedRun,
    place: int,
    group: np.ndarray,
    records: Sequence[Mapping[str, Any]],
    first: int,
    count: int,
    pieces: Pieces | None,
) -> dict[str, Any]:
    """`told` of the one at `place` in its `group`, entries of the index with their records, but for "siblings"."""
    entry, record = group[place], records[place]
    return {
        **{key: record.get(key) for key in _COPIED},
        "staleness": int(staleness(entry)),
        "prompt_tokens": len(record["prompt_ids"]),
        "segments": segments_of(record),
        "tokens": tokens_of(record, first, min(count, MOST_TOKENS), pieces),
        "why": why(record, records, files.config),
        "resume": resume_command(files, record),
        "life": life(list(files.trace.events_of(int(entry["group_id"]))), record["rollout_id"]),
    }


def segments_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each with "first", the place of its first token, and "staleness": the trainer's version as the rollout left,
    less its own; None for what no policy sampled."""
    found, first = [], 0
    for segment in record["segments"]:
        age = max(0, record["step"] - 1 - segment["policy_version"]) if segment["trainable"] else None
        found.append({**segment, "first": first, "staleness": age})
        first += segment["num_tokens"]
    return found


def tokens_of(record: Mapping[str, Any], first: int, count: int, pieces: Pieces | None) -> dict[str, Any]:
    """`count` tokens from the `first` on, of "of" there are. Their texts are those of the whole answer, cut."""
    ids, trained = record["token_ids"], by_token(record)
    if trained is not None:
        trained = {of: numbers(v) if of in KEYS else v for of, v in trained.items()}
    texts = None
    if pieces is not None:
        # What a token says may hang on a few before it, and the last one is no character yet where it begins one.
        begin, end = max(0, first - _AROUND), first + count
        known = pieces(ids[begin : end + _AROUND])
        texts = None if known is None else known[first - begin : end - begin]
    return {
        "first": first,
        "of": len(ids),
        "ids": list(ids[first : first + count]),
        "logprobs": numbers(record["logprobs"][first : first + count]),
        "texts": texts,
        "trained": None if trained is None else {of: v[first : first + count] for of, v in trained.items()},
    }


def resume_command(files: IndexedRun, record: Mapping[str, Any]) -> str:
    """What to type to go on from the end of its prompt; with :TOKEN after it, from that token on."""
    place = f"{record['step']}/{record['rollout_id']}"
    return f"rollover sample --from {shlex.quote(str(files.directory))} {place}"


def life(events: Sequence[TraceEvent], of: str) -> list[dict[str, Any]]:
    """What happened to it and to its group, in order: "tokens" and "segments" as docs/trace.md has them."""
    name = of.partition("-")[2]
    mine = [event for event in events if event.sibling is None or str(event.sibling) in (name, name.partition(".")[0])]
    return [
        {
            "kind": event.kind,
            "seconds": event.seconds,
            "version": event.version,
            "whole_group": event.sibling is None,
            "tokens": event.tokens,
            "segments": [list(segment) for segment in event.segments],
            "reason": event.reason,
        }
        for event in mine
    ]
