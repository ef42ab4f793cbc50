"""Per-token training statistics of a rollout (track.token_stats): loss mask, advantages, weights, entropies.

Record format: the mask as run lengths; numbers with five significant digits, a single number if all are equal.
Shapes: [n] all tokens of a rollout; [M] its tokens in the loss.
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
    """`mask` [n] bool: the M tokens in the loss. `rejected` [M] bool: tokens that algorithm.rejection removed from it.
    The others [M] float32, NaN if missing.

    advantages: as in the loss. importance_weights: exp(log-prob in the first forward pass of the step - log-prob when
    sampled), before any bound; of rejected tokens under the weights at the start of the step. loss_weights: factor of
    the advantage in the gradient of the token's log-prob, after every bound, clip and mask. entropies: of the
    distribution in that first pass, at the sampling temperature (nats).
    """

    mask: np.ndarray
    rejected: np.ndarray
    advantages: np.ndarray
    importance_weights: np.ndarray
    loss_weights: np.ndarray
    entropies: np.ndarray

    def record(self) -> dict[str, Any]:
        """Return the JSON values by KEYS; None if no token has a value."""
        rejected = None
        if self.rejected.any():
            places = np.zeros(len(self.mask), bool)
            places[np.flatnonzero(self.mask)[self.rejected]] = True
            rejected = run_lengths(places)
        numbers = rounded(np.stack([getattr(self, name) for name in _NUMBERS]))
        return {"loss_mask": run_lengths(self.mask), "rejected": rejected, **dict(zip(_NUMBERS, numbers, strict=True))}


def record_of(stats: TokenStats | None) -> dict[str, Any]:
    """Return the JSON values by KEYS, all None without statistics."""
    return _NOTHING if stats is None else stats.record()


def by_token(record: Mapping[str, Any]) -> dict[str, list[Any]] | None:
    """Return the statistics of a record by token [n]: "mask" and "rejected" as bool, numbers by KEYS, None if missing.

    None if the record has no statistics. ValueError if the lengths do not agree.
    """
    if record.get("loss_mask") is None:
        return None
    mask = mask_from_run_lengths(record["loss_mask"])
    rejected = mask_from_run_lengths(record["rejected"]) if record.get("rejected") else np.zeros_like(mask)
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
    """Return the lengths of the runs of False, True, False...: [0, 5] is five times True."""
    if mask.all():
        return [0, len(mask)] if len(mask) else [0]
    changes = np.flatnonzero(np.diff(mask)) + 1
    ends = [0, *changes.tolist(), len(mask)]
    lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    return [0, *lengths] if len(mask) and mask[0] else lengths


def mask_from_run_lengths(lengths: Sequence[int]) -> np.ndarray:
    """Return the mask of these `run_lengths`."""
    mask = np.zeros(sum(lengths), bool)
    for index, end in enumerate(accumulate(lengths)):
        if index % 2:
            mask[end - lengths[index] : end] = True
    return mask


def rounded(rows_KM: np.ndarray) -> list[list[float | None] | None]:
    """Round each row to five significant digits; one number if all are equal, None if none is finite."""
    finite_KM = np.isfinite(rows_KM)
    found_KM = np.where(finite_KM, rows_KM, 0.0).astype(np.float64)
    # A whole power of 10 is exact, so the quotient is the float nearest to the decimal.
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
