"""One rollout for the page: what it was asked and answered, which weights sampled which part of that, what it was
worth, who its siblings were, and its life.

Texts are what they are: the page shows them as text and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollover.reading.rollout_index import RolloutIndex, rollout_id, staleness
from rollover.reading.run_files import RunFiles
from rollover.track.trace import TraceEvent
from rollover.view.found import row_of
from rollover.view.numbers import numbers

MOST_TOKENS = 20_000
_COPIED = (
    "rollout_id", "group_id", "sibling", "role", "trajectory", "context", "group_size", "task_id", "attempt", "source",
    "reward", "step", "outcome", "messages", "prompt", "plain", "columns", "completion", "score", "extras", "shaping",
    "error", "turns", "advantage", "stop_reason", "num_tokens",
)  # fmt: skip
Pieces = Callable[[Sequence[int]], list[str] | None]
"""The text of each token, so that together they are the text of all; None where nobody knows it."""


def told(
    files: RunFiles, step: int, of: str, first: int = 0, count: int = 2000, pieces: Pieces | None = None
) -> dict[str, Any]:
    """The rollout of this id that left with `step`, with `count` of its tokens from the `first` on.

    KeyError where there is none. "segments" have their place among the tokens, and how stale each was as the rollout
    left; "tokens": ids, log-probs as they were sampled, and texts, None where `pieces` knows none; "siblings": all
    rollouts of its group; "life": its own events and its group's, [] without a trace.
    """
    index = files.rollouts
    entries = index.entries()
    place = place_of(entries, step, of)
    if place is None:
        raise KeyError(f"no rollout {of} left the run with step {step}")
    entry = entries[place]
    record = index.record(entry)
    files.trace.look()
    return {
        **{key: record.get(key) for key in _COPIED},
        "staleness": int(staleness(entry)),
        "prompt_tokens": len(record["prompt_ids"]),
        "segments": segments_of(record),
        "tokens": tokens_of(record, first, min(count, MOST_TOKENS), pieces),
        "siblings": siblings_of(index, entries, entry),
        "life": life(list(files.trace.events_of(int(entry["group_id"]))), record["rollout_id"]),
    }


def place_of(entries: np.ndarray, step: int, of: str) -> int | None:
    """Where the rollout is that has this id and left with this step; the last one, where it left more than once."""
    for place in np.flatnonzero(entries["step"] == step)[::-1]:
        if rollout_id(entries[int(place)]) == of:
            return int(place)
    return None


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
    ids = record["token_ids"]
    texts = None
    if pieces is not None:
        # What a token says may hang on a few before it.
        begin = max(0, first - 16)
        known = pieces(ids[begin : first + count])
        texts = None if known is None else known[first - begin :]
    return {
        "first": first,
        "of": len(ids),
        "ids": list(ids[first : first + count]),
        "logprobs": numbers(record["logprobs"][first : first + count]),
        "texts": texts,
    }


def siblings_of(index: RolloutIndex, entries: np.ndarray, entry: np.void) -> list[dict[str, Any]]:
    """All rollouts of its group that left with it, itself too, with the beginnings of their answers."""
    together = (entries["group_id"] == entry["group_id"]) & (entries["step"] == entry["step"])
    return [row_of(index, entries[place], with_text=True) for place in np.flatnonzero(together)]


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
