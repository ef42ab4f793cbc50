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
from rollover.models.locate import ALIAS, cache_root
from rollover.plugins.dashboard.explain_advantage import explain_advantage
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.numbers import numbers
from rollover.plugins.dashboard.query import NotFound
from rollover.plugins.dashboard.rollout_index import find, staleness
from rollover.plugins.dashboard.rollout_query import row_of
from rollover.track.token_stats import KEYS, by_token
from rollover.track.trace import TraceEvent
from rollover.types import Media

MOST_TOKENS = 20_000
_AROUND = 16  # tokens of context for their texts
_COPIED = (
    "rollout_id", "group_id", "sibling", "role", "trajectory", "context", "group_size", "task_id", "attempt", "source",
    "reward", "step", "outcome", "messages", "prompt", "media", "later_media", "plain", "columns", "completion",
    "score", "extras", "shaping", "texts", "error", "turns", "advantage", "credit", "stop_reason", "num_tokens",
)  # fmt: skip
TokenTexts = Callable[[Sequence[int]], list[str] | None]
"""Returns the text of each token, which concatenate to the whole text; None without a tokenizer."""


def rollout_detail(
    files: IndexedRun,
    step: int,
    of: str,
    first: int = 0,
    count: int = 2000,
    token_texts: TokenTexts | None = None,
) -> dict[str, Any]:
    """Return the rollout of this id that left with `step`, with `count` of its tokens from `first` on.

    NotFound without it. "segments": with first token and staleness; "tokens": ids, log-probs when sampled, texts (None
    without a tokenizer), and in "trained" the statistics of track/token_stats.py (None if not recorded); "why":
    sentences about its advantage; "resume": the command to continue it; "siblings": all rollouts of its group; "life":
    events of the rollout and its group, [] without a trace.
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
    found = detail_in_group(files, int(np.flatnonzero(places == place)[0]), group, records, first, count, token_texts)
    siblings = [row_of(index, *sibling) for sibling in zip(group, records, strict=True)]
    return found | {"siblings": siblings}


def detail_in_group(
    files: IndexedRun,
    place: int,
    group: np.ndarray,
    records: Sequence[Mapping[str, Any]],
    first: int,
    count: int,
    token_texts: TokenTexts | None,
) -> dict[str, Any]:
    """Return `rollout_detail` of the rollout at `place` in its `group` (index entries with records), without
    "siblings"."""
    entry, record = group[place], records[place]
    return {
        **{key: record.get(key) for key in _COPIED},
        "staleness": int(staleness(entry)),
        "prompt_tokens": len(record["prompt_ids"]),
        "segments": segments_of(record),
        "tokens": tokens_of(record, first, min(count, MOST_TOKENS), token_texts),
        "why": explain_advantage(record, records, files.config),
        "resume": resume_command(files, record),
        "life": life(list(files.trace.events_of(int(entry["group_id"]))), record["rollout_id"]),
    }


def segments_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the segments with "first", the place of the first token, and "staleness" when the rollout left.

    Staleness is None for segments of environments.
    """
    found, first = [], 0
    for segment in record["segments"]:
        age = max(0, record["step"] - 1 - segment["policy_version"]) if segment["trainable"] else None
        found.append({**segment, "first": first, "staleness": age})
        first += segment["num_tokens"]
    return found


def tokens_of(record: Mapping[str, Any], first: int, count: int, token_texts: TokenTexts | None) -> dict[str, Any]:
    """Return `count` tokens from `first` on, of "of" tokens."""
    ids, trained = record["token_ids"], by_token(record)
    if trained is not None:
        trained = {of: numbers(v) if of in KEYS else v for of, v in trained.items()}
    texts = None
    if token_texts is not None:
        # A token's text may depend on a few tokens before it, and a character may end in a later token.
        begin, end = max(0, first - _AROUND), first + count
        known = token_texts(ids[begin : end + _AROUND])
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
    """Return the command that samples from the end of its prompt; a suffix :TOKEN continues from that token."""
    place = f"{record['step']}/{record['rollout_id']}"
    return f"rollover sample --from {shlex.quote(str(files.directory))} {place}"


def life(events: Sequence[TraceEvent], of: str) -> list[dict[str, Any]]:
    """Return the events of the rollout and its group, in order, as docs/trace.md describes them."""
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


MOST_PIXELS = 640  # per side


def picture(files: IndexedRun, step: int, of: str, number: int) -> dict[str, Any]:
    """Return image `number` (from 0) of a rollout as PNG in a data URL, at most MOST_PIXELS per side.

    If it has changed or cannot be read, "url" is None and "why" has the reason. NotFound without the image.
    """
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
    except ValueError as error:  # the query is valid
        return {"url": None, "why": str(error)}
    except (TypeError, KeyError, AttributeError) as error:
        return {"url": None, "why": f"its record is damaged ({type(error).__name__}: {error})"}
    image.thumbnail((MOST_PIXELS, MOST_PIXELS))
    out = io.BytesIO()
    image.save(out, "PNG")
    return {"url": f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}", "why": None}


_FILE = "tokenizer.json"
_INCOMPLETE = "\ufffd"  # a decoder's output for an incomplete character
_MOST_INCOMPLETE = 8  # tokens; a UTF-8 character has at most 4 bytes, and a byte is at most one token
_BYTES = 4
_MOST_BYTES = 1 << 27  # of a tokenizer file; 34 MB for 250,000 tokens


def split_text(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """Return the text of each token, which concatenate to the whole text.

    The last token of a character has its text; the tokens before it have none.
    """
    texts = [""] * len(ids)
    known = done = 0  # texts before `done` are final; tokens from `known` to `done` are the context for decoding
    for end in range(1, len(ids) + 1):
        if end - done > _MOST_INCOMPLETE:  # not a character; waiting longer would take quadratic time
            settled = end - _BYTES  # the last tokens may begin a character
            texts[settled - 1] = decode(ids[known:settled])[len(decode(ids[known:done])) :]
            known, done = done, settled
        before, now = decode(ids[known:done]), decode(ids[known:end])
        if end == len(ids) or not (now.endswith(_INCOMPLETE) or len(now) <= len(before)):
            texts[end - 1] = now[len(before) :]
            known, done = done, end
    return texts


class RunTokenTexts:
    """TokenTexts by the tokenizer of a run, reloaded when the file changes; None without one."""

    def __init__(self, files: IndexedRun) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._of: list[tuple[Path, int, int]] = []  # files of the tokenizer, with size and modification time

    def __call__(self, ids: Sequence[int]) -> list[str] | None:
        with self._lock:
            if (found := self._found()) != self._of:
                self._decode, self._of = self._load([path for path, *_ in found]), found
            decode = self._decode
        return None if decode is None else split_text(decode, ids)

    def _load(self, paths: Sequence[Path]) -> Callable[[Sequence[int]], str] | None:
        from tokenizers import Tokenizer

        for path in paths:
            try:
                tokenizer = Tokenizer.from_file(str(path))
            except Exception:  # boundary: the library raises its own exception for an invalid file
                continue
            return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
        return None

    def _found(self) -> list[tuple[Path, int, int]]:
        """Find tokenizer files: in the run's directory, beside its saved models, or beside its base model."""
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
