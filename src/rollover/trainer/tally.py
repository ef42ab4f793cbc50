"""The sums of micro-batches, and what they tell of each token. They stay on the device until they are asked for.

To ask a device for a number is to wait until it has computed all that it was given before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from rollover.models.devices import widest_float
from rollover.types import Sample

TOKEN_STATS = "tokens"
"""Among the sums of a micro-batch the one that is none: what is told of each token [B, T, K], float32."""


class Tally:
    """Adds up sums by name; what is named max/... by maximum. What is told of tokens is kept by rollout."""

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[str, ...], torch.Tensor]] = []
        self._totals: dict[str, float] = {}
        self._divisors: dict[str, float] = {}
        self._token_stats: list[tuple[Sequence[Sample], torch.Tensor]] = []
        self._tokens: dict[str, np.ndarray] = {}

    def add(self, sums: Mapping[str, torch.Tensor], samples: Sequence[Sample] = ()) -> None:
        """The sums of one micro-batch, each one number. `samples`: its rows, where it has TOKEN_STATS, too."""
        # In double precision, where the device has it, as Python adds numbers.
        numbers = {name: _wide(value) for name, value in sums.items() if name != TOKEN_STATS}
        self._waiting.append((tuple(numbers), torch.stack(list(numbers.values()))))
        if TOKEN_STATS in sums:
            self._token_stats.append((samples, sums[TOKEN_STATS]))

    def pop_token_stats(self) -> dict[str, np.ndarray]:
        """rollout_id -> what was told of each of its loss tokens [loss tokens, K]; nothing is left here."""
        found, told = self._tokens, self._token_stats
        self.drop_token_stats()
        if told:
            flat = torch.cat([told_BTK.flatten() for _, told_BTK in told]).cpu().numpy()
            parts = np.split(flat, np.cumsum([told_BTK.numel() for _, told_BTK in told])[:-1])
            for (samples, told_BTK), part in zip(told, parts, strict=True):
                rows = part.reshape(told_BTK.shape)
                found |= {s.rollout_id: row[: len(s.mask)][s.mask] for s, row in zip(samples, rows, strict=True)}
        return found

    def drop_token_stats(self) -> None:
        """Keep the sums alone."""
        self._token_stats, self._tokens = [], {}

    def vectors(self) -> list[tuple[tuple[str, ...], list[float]]]:
        """What was added, as (names, numbers) of each addition."""
        return [(names, vector.tolist()) for names, vector in self._waiting]

    @classmethod
    def from_vectors(
        cls, vectors: Iterable[tuple[Sequence[str], Sequence[float]]], tokens: Mapping[str, np.ndarray]
    ) -> Tally:
        """To which was added what the `vectors` of others say, and their `pop_token_stats`."""
        out = cls()
        out._waiting = [(tuple(names), torch.tensor(numbers, dtype=torch.float64)) for names, numbers in vectors]
        out._tokens = dict(tokens)
        return out

    def absorb(self, other: Tally) -> None:
        """Add what was added to `other`, in the same order; that is left empty."""
        self._waiting += other._waiting
        self._token_stats += other._token_stats
        self._tokens |= other._tokens
        other._waiting, other._token_stats, other._tokens = [], [], {}

    def divide(self, name: str, divisor: float) -> None:
        """The total of `name` is to be divided by that, once all of it is here."""
        self._divisors[name] = divisor

    def totals(self) -> dict[str, float]:
        """The totals of all that was added."""
        return totals_of([self])


def totals_of(tallies: Sequence[Tally]) -> dict[str, float]:
    """The totals over all of them, in one transfer."""
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
    """Add `sums` to `totals`; what is named max/... by maximum."""
    for key, number in sums.items():
        old = totals.get(key)
        totals[key] = number if old is None else max(old, number) if key.startswith("max/") else old + number


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(widest_float(value.device))
