"""The rewards of a run: the pool of worker processes, observed, so that a user is told of what fails."""

from __future__ import annotations

from rollover.config import Config
from rollover.rewards.observer import RewardObserver
from rollover.rewards.pool import RewardPool
from rollover.rewards.protocol import ScoringPool


def build_rewarder(config: Config, *, training: bool, pool: ScoringPool | None = None) -> RewardObserver[ScoringPool]:
    """What scores rollouts: `score` and `close` of the observer, and its pool as `.rewarder`. Starts no process.

    `pool`: the workers; None: processes of this machine.

    `training`: scores that are all the same over the first two steps are told, as nothing can be learned from them
    (unless a teacher teaches, or shaping tells equal scores apart: then something can).
    """
    shaped = config.rewards.overlong_buffer_tokens or any(row.shaping for row in config.rewards.functions)
    told = training and not config.distill.teacher and not shaped
    per_step = config.rollout.groups_per_step * config.rollout.group_size
    return RewardObserver(pool or RewardPool(config.rewards), num_equal=2 * per_step if told else 0)
