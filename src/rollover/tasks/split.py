"""Which problems are held out for evaluation. Pure: no files, no randomness, no state.

Owns the rule that train and eval never share a problem, however small the space of problems: a problem belongs to one
side by a hash of what makes it the same as another (same.py), not by a seed or a row number: the sides are the same in
every run. Never decides an order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SplitName = Literal["train", "eval"]


def key_of(text: str) -> int:
    """The 64-bit blake2b hash of a text: of one that identifies a problem, its key."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class Split:
    """Decides the side of a problem by its keys: first that of what makes it the same as another (same.py), then, where
    that is not its text, the key of its text.

    A source with held-out rows of its own (tasks.sources.eval_path, eval_split) is split by files. Of every other one
    the hash holds a problem out if first key / 2^64 < eval_fraction. `eval_file_keys`: of all problems in held-out
    files. `held_out_keys`: of the rows that the hash holds out. `trained_keys`: of the rows that are trained. All three
    as far as they are known.
    """

    eval_fraction: float
    eval_file_keys: frozenset[int] = frozenset()
    trained_keys: frozenset[int] = frozenset()
    held_out_keys: frozenset[int] = frozenset()

    def accepts(self, keys: Sequence[int], split: SplitName, by_file: bool) -> bool:
        """True if a problem of a source (split by file, or by hash) may be used on this side.

        No key is accepted on both sides, whichever source it comes from. Problems of a held-out file are never trained.
        Of a source without one the hash of the first key decides; what it holds out is not trained under another first
        key either, and is not evaluated where a row that is trained has one of its keys.
        """
        if split == "train":
            fresh = by_file or not (self._held_out(keys[0]) or any(key in self.held_out_keys for key in keys))
            return fresh and not any(key in self.eval_file_keys for key in keys)
        if by_file:
            return True  # its rows come from the held-out file
        return self._held_out(keys[0]) and not self._trained(keys)

    def on_neither_side(self, keys: Sequence[int], by_file: bool) -> bool:
        """The hash holds it out, but a row that is trained has one of its keys."""
        return not by_file and self._held_out(keys[0]) and self._trained(keys)

    def _held_out(self, key: int) -> bool:
        return key < self.eval_fraction * 2**64

    def _trained(self, keys: Sequence[int]) -> bool:
        return any(key in self.trained_keys for key in keys)
