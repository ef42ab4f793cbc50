"""Which samples each update of a training step is made of: every minibatch once an epoch.

    minibatches ──▶ epoch 0: as they are ──▶ epoch 1, 2, ...: the same groups, drawn into other minibatches

Pure: the same samples, seed and policy version give the same updates, also where a step is trained again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rollover.config import TrainConfig
from rollover.trainer.objective import Counts
from rollover.trainer.packing import split_groups
from rollover.types import Sample


@dataclass(frozen=True)
class Update:
    """`samples`: those whose gradient is computed. `counts`: of the whole minibatch, with what is left out of them."""

    samples: list[Sample]
    counts: Counts


class Computed:
    """How many loss tokens of a step's updates a backend has computed, for who watches from another thread."""

    def __init__(self, backend: object) -> None:
        self.backend, self._before, self._total = backend, 0, 0

    def begin(self, updates: Sequence[Update]) -> None:
        """These are computed now."""
        self._before = self._count()
        self._total = sum(int(s.mask.sum()) for update in updates for s in update.samples)

    def tokens(self) -> tuple[int, int]:
        """(those that are computed, all of them); (0, 0) of a backend without `trained_tokens`."""
        return (self._count() - self._before, self._total) if hasattr(self.backend, "trained_tokens") else (0, 0)

    def _count(self) -> int:
        return getattr(self.backend, "trained_tokens", 0)


def updates_of(
    minibatches: list[list[Sample]], config: TrainConfig, key: str, computed: Callable[[Sample], bool]
) -> list[Update]:
    """The updates of a step, whose first epoch is of `minibatches`. `key`: what the draws of the others depend on.
    `computed`: whether a sample has a gradient."""
    return [
        Update([s for s in part if computed(s)], Counts.of(part)) for part in _of_all_epochs(minibatches, config, key)
    ]


def _of_all_epochs(minibatches: list[list[Sample]], config: TrainConfig, key: str) -> Iterator[list[Sample]]:
    yield from minibatches
    samples = [s for part in minibatches for s in part]
    for epoch in range(1, config.epochs_per_step):
        if config.reshuffle and len(minibatches) > 1:
            yield from split_groups(samples, len(minibatches), random.Random(f"{key}/{epoch}"))
        else:
            yield from minibatches
