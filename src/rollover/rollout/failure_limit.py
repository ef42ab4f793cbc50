"""The failure limit ends a run after too many failures of groups or of the engine in a row. Pure.

Owns the limits and the error messages. Up to a limit, failures are data.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rollover.rollout.lifecycle import Lifecycle
from rollover.types import DropReason, Reward

# Steps' worth of failed groups in a row after which a reward service, or the engine, must be down.
_MAX_FAILED_STEPS = 4
_MAX_CAUSES = 3  # of missing rewards, in a message


class FailureLimit:
    """Counter of failures in a row: of extensions, and of groups that were dropped.

    `max_failures`: failures in a row of one rollout's extensions that drop its group. `max_filtered_steps`: steps'
    worth of filtered groups in a row that end the run; 0: no limit.
    """

    def __init__(self, lifecycle: Lifecycle, max_failures: int = 1, max_filtered_steps: int = 10) -> None:
        self._lifecycle, self._max_failures, self._max_filtered_steps = lifecycle, max_failures, max_filtered_steps
        self._num_failed = self._num_failed_groups = self._num_filtered = self._num_engine_failures = 0
        self._causes: Counter[str] = Counter()  # errors of missing rewards of groups in a row, without numbers
        self._texts: dict[str, str] = {}

    def on_answer(self) -> None:
        """Reset the count of engine failures: an extension succeeded."""
        self._num_engine_failures = 0

    def on_failure(self, why: str) -> None:
        """Count a failed extension. Raises ValueError if the engine fails at everything.

        That is before the first running rollout reaches `max_failures`, so that an engine that is down costs no task.
        The limit assumes that at least one step, or two groups, run: failures of fewer rollouts may be their own fault.
        """
        self._num_engine_failures += 1
        lifecycle, num = self._lifecycle, self._num_engine_failures
        of_a_group = lifecycle.config.rollouts_per_group
        of_a_step = lifecycle.config.groups_per_step * of_a_group
        at_once = min(of_a_step, lifecycle.scheduler.max_running or of_a_step)
        if num > max(self._max_failures - 1, 1) * max(len(lifecycle.cache.running()), at_once, 2 * of_a_group):
            raise ValueError(
                f"the engine failed {num} times in a row, at every request; the last error is: {why}."
                " Go on with --resume once it works"
            )

    def on_complete(self) -> None:
        """Reset the count of stalled or failed groups: a group is finished."""
        self._num_failed_groups = 0

    def on_ready(self) -> None:
        self._num_filtered = 0
        self._reset_failed()

    def on_dropped(self, reason: DropReason, rewards: Sequence[Reward]) -> None:
        """Count a dropped group, which has these rewards.

        Raises ValueError if rewards keep failing, or if filters leave nothing to train on.
        """
        if reason is DropReason.TOO_FEW_REWARDS:
            self._on_failed(rewards)
            return
        self._reset_failed()
        if reason is DropReason.FILTERED:
            self._on_filtered(rewards)

    def _on_failed(self, rewards: Sequence[Reward]) -> None:
        lifecycle = self._lifecycle
        self._num_failed += 1
        for error in (reward.error or "no reason given" for reward in rewards if reward.missing):
            cause = re.sub(r"\d+", "0", error)
            self._causes[cause] += 1
            self._texts[cause] = error
        config, num_failed = lifecycle.config, self._num_failed
        ledger, held = lifecycle.ledger, lifecycle.cache.groups.values()
        started = ledger.trained.groups > 0 or ledger.filtered.total() > 0 or any(g.ready for g in held)
        if num_failed < config.groups_per_step * (_MAX_FAILED_STEPS if started else 1):
            return
        raise ValueError(
            f"rewards: none of {'the last' if started else 'the first'} {num_failed} groups got rewards.min_valid ="
            f" {lifecycle.min_valid_rewards} valid rewards of {config.rollouts_per_group}; {self._describe_causes()}."
            " Fix that, and resume with --resume"
        )

    def _describe_causes(self) -> str:
        """Return why rewards are missing, the most common reasons first."""
        if not self._causes:
            return "no reward is missing, so no role has so many trajectories in a group"
        causes = [f"{self._texts[cause]} ({num} times)" for cause, num in self._causes.most_common(_MAX_CAUSES)]
        return f"{self._causes.total()} are missing: {'; '.join(causes)}"

    def _reset_failed(self) -> None:
        self._num_failed = 0
        self._causes.clear()
        self._texts.clear()

    def _on_filtered(self, rewards: Sequence[Reward]) -> None:
        """Count a filtered group. Raises ValueError after many steps' worth of them."""
        self._num_filtered += 1
        lifecycle, num, most = self._lifecycle, self._num_filtered, self._max_filtered_steps
        if not most or num < lifecycle.config.groups_per_step * most:
            return
        counts = ", ".join(f"{name} {count}" for name, count in sorted(lifecycle.ledger.filtered.items()))
        scores = ", ".join(f"{r.score:g}" for r in rewards if r.score is not None)
        raise ValueError(
            f"filters: each of the last {num} scored groups was dropped (in the whole run: {counts}); the scores of the"
            f" last one are {scores}. Give tasks that the model solves sometimes, raise rollout.group_size or"
            " filters.give_up_after_steps, or loosen [filters], and resume with --resume. The answers are in rollouts/"
        )

    def on_group_failed(self) -> None:
        """Count a group dropped for a stalled or failed rollout. Raises ValueError after too many in a row."""
        self._num_failed_groups += 1
        if self._num_failed_groups >= self._lifecycle.config.groups_per_step * _MAX_FAILED_STEPS:
            raise ValueError(
                f"watchdog: the last {self._num_failed_groups} groups were dropped because the engine stalled or"
                " failed at a rollout, and none was finished in between: the engine seems to hang. Go on with --resume"
                " once it works; raise watchdog.rollout_timeout_s if it is only slow"
            )
