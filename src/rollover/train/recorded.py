"""Recorded rollouts instead of generated ones (run.replay_rollouts): for debugging a trainer without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollover.config import Config
from rollover.track.recorder import read_rollouts
from rollover.types import Group


class RecordedRollouts:
    """The groups of one recorded step after the other; [] at the end. Steps that trained nothing are left out."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(
                f"run.replay_rollouts = {str(folder)!r}: no such directory (give a run's rollouts/ folder)"
            )
        self._steps: Iterator[list[Group]] = (groups for groups in read_rollouts(folder) if groups)

    @classmethod
    def of(cls, config: Config) -> RecordedRollouts | None:
        """None unless run.replay_rollouts is set."""
        return cls(Path(config.run.replay_rollouts)) if config.run.replay_rollouts else None

    def skip(self, num_steps: int) -> None:
        """Leave out the first recorded steps: a resumed run has trained them."""
        for _ in range(num_steps):
            self.next()

    def next(self) -> list[Group]:
        """The groups of the next recorded step; [] when they are used up."""
        return next(self._steps, [])
