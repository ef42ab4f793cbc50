"""One rollout for the page: prompt, answer, tokens with their versions, siblings, history and images.

The page shows texts as text only. Images are decoded and encoded again, and only if their pixels have the recorded
hash; the bytes of a file are never sent. Texts of tokens come from the run's tokenizer if it is on this machine: no
network, no weights, no torch.
"""

from __future__ import annotations

import base64
import io
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollover.images import digest_of, read_image
from rollover.models.smollm2 import ALIAS, cache_root
from rollover.plugins.dashboard.explain_advantage import why
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.numbers import numbers
from rollover.plugins.dashboard.query import NotFound
from rollover.plugins.dashboard.rollout_index import find, staleness
from rollover.plugins.dashboard.rollout_query import row_of
from rollover.track.token_stats import KEYS, by_token
from rollover.track.trace import TraceEvent
from rollover.types import Media

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
        raise NotFound(f"no rollout {of} left the run with step {step}")
    entry = entries[place]
    places = np.flatnonzero((entries["group_id"] == entry["group_id"]) & (entries["step"] == entry["step"]))
    group = entries[places]
    records = index.records_of(group)
    files.trace.look()
    found = detail_in_group(files, int(np.flatnonzero(places == place)[0]), group, records, first, count, pieces)
    siblings = [row_of(index, *sibling) for sibling in zip(group, records, strict=True)]
    return found | {"siblings": siblings}


def detail_in_group(
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


MOST_PIXELS = 640  # a side


def picture(files: IndexedRun, step: int, of: str, number: int) -> dict[str, Any]:
    """Image `number`, counted from 0, of the rollout of this id that left with `step`: as PNG in a data
    URL, at most MOST_PIXELS a side; without "url" and with "why", where it has changed or cannot be read. NotFound
    where there is none."""
    index = files.rollouts
    place = find(index.entries(), step, of)
    if place is None:
        raise NotFound(f"no rollout {of} left the run with step {step}")
    record = index.record(index.entries()[place])
    media = [*(record.get("media") or ()), *(record.get("later_media") or ())]
    if not 0 <= number < len(media):
        raise NotFound(f"rollout {of} has {len(media)} images")
    try:
        recorded = Media.from_json(media[number])
        image = read_image(recorded.source, files.directory / "media")
        if digest_of(image) != recorded.digest:
            raise ValueError(f"image {recorded.source} has changed since it was in the rollout")
    except ValueError as error:  # nothing that is asked for is wrong
        return {"url": None, "why": str(error)}
    except (TypeError, KeyError, AttributeError) as error:
        return {"url": None, "why": f"its record is damaged ({type(error).__name__}: {error})"}
    image.thumbnail((MOST_PIXELS, MOST_PIXELS))
    out = io.BytesIO()
    image.save(out, "PNG")
    return {"url": f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}", "why": None}


_FILE = "tokenizer.json"
_WAITING = "\ufffd"  # what a decoder writes for bytes that are no character yet
_MOST_WAITING = 8  # tokens; a character of UTF-8 has 4 bytes, each a token at most
_BYTES = 4
_MOST_BYTES = 1 << 27  # of a tokenizer: those of 250,000 tokens have 34 MB


def pieces(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The text of each token: together that of all of them."""
    texts = [""] * len(ids)
    known = told = 0  # what stands before `known` is told; from there to `told` it is the beginning to compare with
    for end in range(1, len(ids) + 1):
        if end - told > _MOST_WAITING:  # these are no character, and never will be: a longer wait would be quadratic
            settled = end - _BYTES  # the last ones may be the beginning of one
            texts[settled - 1] = decode(ids[known:settled])[len(decode(ids[known:told])) :]
            known, told = told, settled
        before, now = decode(ids[known:told]), decode(ids[known:end])
        if end == len(ids) or not (now.endswith(_WAITING) or len(now) <= len(before)):
            texts[end - 1] = now[len(before) :]
            known, told = told, end
    return texts


class RunTokenTexts:
    """`pieces` by the tokenizer of a run, read again where it is another file now; None where there is none."""

    def __init__(self, files: IndexedRun) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._of: list[tuple[Path, int, int]] = []  # of which files: their sizes, and when they were written

    def __call__(self, ids: Sequence[int]) -> list[str] | None:
        with self._lock:
            if (found := self._found()) != self._of:
                self._decode, self._of = self._load([path for path, *_ in found]), found
            decode = self._decode
        return None if decode is None else pieces(decode, ids)

    def _load(self, paths: Sequence[Path]) -> Callable[[Sequence[int]], str] | None:
        from tokenizers import Tokenizer

        for path in paths:
            try:
                tokenizer = Tokenizer.from_file(str(path))
            except Exception:  # boundary: a file of another kind, for which the library has an exception of its own
                continue
            return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
        return None

    def _found(self) -> list[tuple[Path, int, int]]:
        """Where there is one: in the run's directory, beside the models that it saved, or where its model came from."""
        name = str(self._files.value("model.path") or "")
        folders = [self._files.directory / folder for folder in ("", "model", "best_model")]
        if name == ALIAS:
            folders.append(cache_root() / "models" / ALIAS)
        elif name:
            folders.append(Path(name).expanduser())
        found = [folder / _FILE for folder in folders]
        if "/" in name and not name.startswith((".", "/", "~")) and "://" not in name:
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(name, _FILE)
            found += [Path(cached)] if isinstance(cached, str) else []
        sizes = [(path, path.stat()) for path in found if path.is_file()]
        return [(path, of.st_size, of.st_mtime_ns) for path, of in sizes if of.st_size <= _MOST_BYTES]
