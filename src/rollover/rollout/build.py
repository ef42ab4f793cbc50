"""The driver of a run, with its lifecycle and its watchdog, as the configuration says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rollover.algorithms.grouping import Grouping
from rollover.config import Config
from rollover.engine.protocol import Engine
from rollover.envs.protocol import Environment
from rollover.rollout.driver import Driver, NextTask
from rollover.rollout.lifecycle import Lifecycle
from rollover.rollout.watchdog import Watchdog
from rollover.types import Group


def build_driver(
    config: Config,
    engine: Engine,
    next_task: NextTask,
    environment: Environment,
    group_filter: Callable[[Group], tuple[str, str] | None] | None,
    stop_token_ids: Iterable[int],
) -> Driver:
    """See Driver for what it is given. Starts nothing."""
    lifecycle = Lifecycle(
        config.rollout,
        config.engine.max_running,
        config.min_valid_rewards,
        group_filter=group_filter,
        max_filtered_steps=config.filters.give_up_after_steps,
        num_valid=Grouping(config.workflow, config.distill).most_valid,
    )
    watchdog = Watchdog(config.watchdog, config.rewards.allowed_s(config.rollout.rollouts_per_group))
    return Driver(lifecycle, engine, next_task, environment, config.run.seed, stop_token_ids, watchdog, config.workflow)
