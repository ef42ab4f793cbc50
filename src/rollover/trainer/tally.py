"""The sums of micro-batches, and statistics of each token. They stay on the device until they are read.

Reading a number from a device waits until it has computed everything before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from rollover.models.devices import widest_float
from rollover.types import Sample

TOKEN_STATS = "tokens"
"""Key of the statistics of each token [B, T, K], float32, among the sums of a micro-batch (columns: objective.py)."""


class Tally:
    """Adds up sums by name, those named max/... by maximum, and collects token statistics by rollout."""

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[str, ...], torch.Tensor]] = []
        self._totals: dict[str, float] = {}
        self._divisors: dict[str, float] = {}
        self._token_stats: list[tuple[Sequence[Sample], torch.Tensor]] = []
        self._tokens: dict[str, np.ndarray] = {}

    def add(self, sums: Mapping[str, torch.Tensor], samples: Sequence[Sample] = ()) -> None:
        """Add the sums of one micro-batch, a number each. `samples`: its rows, if it has TOKEN_STATS."""
        # In double precision, where the device has it, as Python adds numbers.
        numbers = {name: _wide(value) for name, value in sums.items() if name != TOKEN_STATS}
        self._waiting.append((tuple(numbers), torch.stack(list(numbers.values()))))
        if TOKEN_STATS in sums:
            self._token_stats.append((samples, sums[TOKEN_STATS]))

    def pop_token_stats(self) -> dict[str, np.ndarray]:
        """Return and discard rollout_id -> statistics of its loss tokens [loss tokens, K]."""
        found, pending = self._tokens, self._token_stats
        self.drop_token_stats()
        if pending:
            flat = torch.cat([stats_BTK.flatten() for _, stats_BTK in pending]).cpu().numpy()
            parts = np.split(flat, np.cumsum([stats_BTK.numel() for _, stats_BTK in pending])[:-1])
            for (samples, stats_BTK), part in zip(pending, parts, strict=True):
                rows = part.reshape(stats_BTK.shape)
                found |= {s.rollout_id: row[: len(s.mask)][s.mask] for s, row in zip(samples, rows, strict=True)}
        return found

    def drop_token_stats(self) -> None:
        """Discard the token statistics."""
        self._token_stats, self._tokens = [], {}

    def vectors(self) -> list[tuple[tuple[str, ...], list[float]]]:
        """Return the (names, numbers) of each addition."""
        return [(names, vector.tolist()) for names, vector in self._waiting]

    @classmethod
    def from_vectors(
        cls, vectors: Iterable[tuple[Sequence[str], Sequence[float]]], tokens: Mapping[str, np.ndarray]
    ) -> Tally:
        """Make a Tally of the `vectors` and token statistics of others."""
        out = cls()
        out._waiting = [(tuple(names), torch.tensor(numbers, dtype=torch.float64)) for names, numbers in vectors]
        out._tokens = dict(tokens)
        return out

    def absorb(self, other: Tally) -> None:
        """Move all additions of `other` here, in the same order."""
        self._waiting += other._waiting
        self._token_stats += other._token_stats
        self._tokens |= other._tokens
        other._waiting, other._token_stats, other._tokens = [], [], {}

    def divide(self, name: str, divisor: float) -> None:
        """Divide the total of `name` by `divisor` once it is complete."""
        self._divisors[name] = divisor

    def totals(self) -> dict[str, float]:
        """Return the totals of all additions."""
        return totals_of([self])


def totals_of(tallies: Sequence[Tally]) -> dict[str, float]:
    """Return the totals over all tallies, in one transfer."""
    vectors = [vector for tally in tallies for _, vector in tally._waiting]
    numbers = iter(torch.cat(vectors).tolist() if vectors else ())
    out: dict[str, float] = {}
    for tally in tallies:
        for names, _ in tally._waiting:
            _combine(tally._totals, {name: next(numbers) for name in names})
        tally._waiting.clear()
        _combine(out, {name: total / tally._divisors.get(name, 1.0) for name, total in tally._totals.items()})
    return out


def _combine(totals: dict[str, float], sums: Mapping[str, float]) -> None:
    """Add `sums` to `totals`; those named max/... by maximum."""
    for key, number in sums.items():
        old = totals.get(key)
        totals[key] = number if old is None else max(old, number) if key.startswith("max/") else old + number


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(widest_float(value.device))
