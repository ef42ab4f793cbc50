"""The sums of micro-batches. They stay on the device until they are asked for, and come from there in one transfer.

To ask a device for a number is to wait until it has computed all that it was given before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from rollover.models.devices import widest_float


class Tally:
    """Adds up sums by name; what is named max/... by maximum."""

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[str, ...], torch.Tensor]] = []
        self._totals: dict[str, float] = {}
        self._divisors: dict[str, float] = {}

    def add(self, sums: Mapping[str, torch.Tensor]) -> None:
        """The sums of one micro-batch, each one number."""
        # In double precision, where the device has it, as Python adds numbers.
        self._waiting.append((tuple(sums), torch.stack([_wide(value) for value in sums.values()])))

    def vectors(self) -> list[tuple[tuple[str, ...], list[float]]]:
        """What was added, as (names, numbers) of each addition."""
        return [(names, vector.tolist()) for names, vector in self._waiting]

    @classmethod
    def of(cls, vectors: Iterable[tuple[Sequence[str], Sequence[float]]]) -> Tally:
        """To which was added what the `vectors` of others say."""
        out = cls()
        out._waiting = [(tuple(names), torch.tensor(numbers, dtype=torch.float64)) for names, numbers in vectors]
        return out

    def absorb(self, other: Tally) -> None:
        """Add what was added to `other`, in the same order; that is left empty."""
        self._waiting += other._waiting
        other._waiting = []

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
