"""What each token of an answer says, where the run's tokenizer is on this machine. No network, no weights, no torch.

A token may be a part of a character: its bytes are told with the token that completes it, and it says nothing itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rollover.models.locate import ALIAS, cache_root
from rollover.plugins.dashboard.indexed_run import IndexedRun

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


class RunTokens:
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
