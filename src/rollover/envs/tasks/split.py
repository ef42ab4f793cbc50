"""Which problems are held out for evaluation. Pure: no files, no randomness, no state.

Owns the rule that train and eval never share a problem, however small the space of problems: a problem belongs to one
side by a hash of what makes it the same as another (same.py), not by a seed or a row number: the sides are the same in
every run. Never decides an order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

SplitName = Literal["train", "eval"]


def key_of(text: str) -> int:
    """64-bit key of the text that identifies a problem: blake2b."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class Split:
    """The side of every problem, by its key.

    A source with a held-out file of its own (tasks.sources.eval_path) is split by the two files; every other source by
    key / 2^64 < eval_fraction. `eval_file_keys` are the problems of all held-out files, `train_file_keys` those of the
    training files beside them.
    """

    eval_fraction: float
    eval_file_keys: frozenset[int] = frozenset()
    train_file_keys: frozenset[int] = frozenset()

    def accepts(self, key: int, split: SplitName, by_file: bool) -> bool:
        """True if a problem of a source (split by file, or by hash) may be used on this side.

        No key is accepted on both sides, whichever sources it comes from: one that a held-out file has is never
        trained; one that only a training file has is never evaluated; else the hash decides.
        """
        if split == "train":
            return key not in self.eval_file_keys and (by_file or not self._held_out(key))
        if by_file:
            return True  # its rows come from the held-out file
        return self._held_out(key) and (key not in self.train_file_keys or key in self.eval_file_keys)

    def _held_out(self, key: int) -> bool:
        return key < self.eval_fraction * 2**64
