"""Patience: ends a run whose groups fail one after another, instead of drawing tasks for ever.

Owns how many in a row are too many, and what the user is told. Failures are data up to there. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollover.rollout.lifecycle import Lifecycle
from rollover.types import Reward

# So many steps' worth of groups in a row that a reward service, or the engine, must be down.
_MAX_FAILED_STEPS = 4


class Patience:
    """Told what becomes of each group, in turn."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._num_failed = self._num_stalled = 0

    def on_complete(self) -> None:
        """All rollouts of a group are finished."""
        self._num_stalled = 0

    def on_ready(self) -> None:
        self._num_failed = 0

    def on_failed(self, rewards: Sequence[Reward]) -> None:
        """A group got too few rewards. ValueError where a reward function never works, or works no more."""
        self._num_failed += 1
        lifecycle = self._lifecycle
        config, num_failed = lifecycle.config, self._num_failed
        started = lifecycle.ledger.trained.groups > 0 or any(g.ready for g in lifecycle.cache.groups.values())
        if num_failed < config.groups_per_step * (_MAX_FAILED_STEPS if started else 1):
            return
        error = next((r.error for r in rewards if r.missing), None)
        raise ValueError(
            f"rewards: none of {'the last' if started else 'the first'} {num_failed} groups got rewards.min_valid ="
            f" {lifecycle.min_valid_rewards} valid rewards of {config.rollouts_per_group}; the last error is: {error}."
            " Fix the reward function" + (", and go on with --resume" if started else "")
        )

    def on_stalled(self) -> None:
        """The watchdog had a group dropped. ValueError where the engine finishes nothing in between."""
        self._num_stalled += 1
        if self._num_stalled >= self._lifecycle.config.groups_per_step * _MAX_FAILED_STEPS:
            raise ValueError(
                f"watchdog: the last {self._num_stalled} groups were dropped because a rollout stalled, and none was"
                " finished in between: the engine seems to hang. Go on with --resume once it works; raise"
                " watchdog.rollout_timeout_s if it is only slow"
            )
