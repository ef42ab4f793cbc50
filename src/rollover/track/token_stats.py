"""What training made of the tokens of one rollout, as it is recorded (track.token_stats): the loss mask, and of each
token that came to the loss its advantage, importance weight, weight in the loss and entropy.

Owns how that is written: the mask as lengths of runs, numbers with five significant digits, one number where all are
the same. [n]: all tokens of a rollout; M: those that came to the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

KEYS = ("loss_mask", "rejected", "advantages", "importance_weights", "loss_weights", "entropies")
_NUMBERS = KEYS[2:]
_DIGITS = 5
_NOTHING: dict[str, Any] = dict.fromkeys(KEYS)


@dataclass(frozen=True)
class TokenStats:
    """`mask` [n] bool: the tokens that came to the loss, M of them. `rejected` [M] bool: those that algorithm.rejection
    took out of it again. The others [M] float32, NaN where there is none.

    advantages: as the loss had them. importance_weights: exp(log-prob in the first forward pass of the step - log-prob
    as it was sampled), before any bound; of rejected tokens under the weights at the start of the step. loss_weights:
    by what the advantage was multiplied in the gradient of the token's log-prob, after every bound, clip and mask.
    entropies: of the distribution in that first pass, at the temperature of sampling (nats).
    """

    mask: np.ndarray
    rejected: np.ndarray
    advantages: np.ndarray
    importance_weights: np.ndarray
    loss_weights: np.ndarray
    entropies: np.ndarray

    def record(self) -> dict[str, Any]:
        """By KEYS, for JSON: what there is of none of its tokens is None."""
        rejected = None
        if self.rejected.any():
            places = np.zeros(len(self.mask), bool)
            places[np.flatnonzero(self.mask)[self.rejected]] = True
            rejected = run_lengths(places)
        numbers = short(np.stack([getattr(self, name) for name in _NUMBERS]))
        return {"loss_mask": run_lengths(self.mask), "rejected": rejected, **dict(zip(_NUMBERS, numbers, strict=True))}


def record_of(stats: TokenStats | None) -> dict[str, Any]:
    """By KEYS: of a rollout that no token of came to a loss, or that nothing was told of, None."""
    return _NOTHING if stats is None else stats.record()


def by_token(record: Mapping[str, Any]) -> dict[str, list[Any]] | None:
    """The same by token [n] of a record as it was written: "mask" and "rejected" as bool, and by KEYS the numbers, None
    where there is none. None: nothing is recorded of it.

    ValueError where the lengths do not agree.
    """
    if record.get("loss_mask") is None:
        return None
    mask = mask_of(record["loss_mask"])
    rejected = mask_of(record["rejected"]) if record.get("rejected") else np.zeros_like(mask)
    if not len(mask) == len(rejected) == record["num_tokens"]:
        raise ValueError(f"loss_mask is of {len(mask)} tokens, and there are {record['num_tokens']}")
    places = np.flatnonzero(mask).tolist()
    found: dict[str, list[Any]] = {"mask": mask.tolist(), "rejected": rejected.tolist()}
    for name in _NUMBERS:
        values = record.get(name)
        if values is None:
            continue
        values = values * len(places) if len(values) == 1 else values
        stream: list[float | None] = [None] * len(mask)
        for place, value in zip(places, values, strict=True):
            stream[place] = None if value is None or value != value else value
        found[name] = stream
    return found


def run_lengths(mask: np.ndarray) -> list[int]:
    """How many are out, in, out, in...: [0, 5] is five that are in."""
    if mask.all():
        return [0, len(mask)] if len(mask) else [0]
    changes = np.flatnonzero(np.diff(mask)) + 1
    ends = [0, *changes.tolist(), len(mask)]
    lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    return [0, *lengths] if len(mask) and mask[0] else lengths


def mask_of(lengths: Sequence[int]) -> np.ndarray:
    """The mask of these `run_lengths`."""
    mask = np.zeros(sum(lengths), bool)
    for index, end in enumerate(accumulate(lengths)):
        if index % 2:
            mask[end - lengths[index] : end] = True
    return mask


def short(rows_KM: np.ndarray) -> list[list[float | None] | None]:
    """Each row with five significant digits; one number where all are the same, None where none is a number."""
    finite_KM = np.isfinite(rows_KM)
    found_KM = np.where(finite_KM, rows_KM, 0.0).astype(np.float64)
    # 10 to a whole power is exact, and so the quotient is the number that its decimals say.
    digits_KM = _DIGITS - 1 - np.floor(np.log10(np.abs(np.where(found_KM == 0, 1.0, found_KM))))
    scale_KM = 10.0 ** digits_KM.clip(0, 22)
    rounded_KM = np.round(found_KM * scale_KM) / scale_KM + 0.0
    out: list[list[float | None] | None] = []
    for row, finite in zip(rounded_KM, finite_KM, strict=True):
        if finite.all():
            out.append(row[:1].tolist() if (row == row[0]).all() else row.tolist())
        elif finite.any():
            out.append([x if good else None for x, good in zip(row.tolist(), finite.tolist(), strict=True)])
        else:
            out.append(None)
    return out
