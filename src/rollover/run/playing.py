"""Plays held-out or sampled tasks with a driver of their own.

Nothing is interrupted, filtered or trained, and the cache, ledger and records of the run do not contain it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from rollover.config import Config
from rollover.config.rollout import SAMPLING, RolloutConfig
from rollover.engine.protocol import Engine
from rollover.envs.protocol import RunEnvironment
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Event, EventKind, Lifecycle
from rollover.rollout.requests import Requests
from rollover.rollout.watchdog import EvaluationStalled, Watchdog
from rollover.types import FIRST_EVAL_GROUP, Group, Prompt, Task

_Result = TypeVar("_Result")

# The options of [rollout] for sampling; the others are about training steps.
_OF_SAMPLING = (*SAMPLING, "max_new_tokens", "stop", "stop_token_ids", "logits")


async def play_groups(
    tasks: Sequence[tuple[Task, Prompt]],
    engine: Engine,
    environment: RunEnvironment,
    config: Config,
    stop_token_ids: frozenset[int],
    seed: int,
    num_siblings: int,
) -> list[Group]:
    """Play `num_siblings` episodes of each task. Returns one group per task, in their order, with rewards.

    Sampling follows config.rollout and `seed`; `stop_token_ids` (EOS) add to those of the config. Where the environment
    fails, or takes too long, the reward has the error. Raises ValueError at the first stall ([watchdog]), or where the
    engine fails at a rollout watchdog.max_failures times in a row: a missing answer would change the mean.
    """
    sampling = {name: getattr(config.rollout, name) for name in _OF_SAMPLING}
    rollout = RolloutConfig(groups_per_step=len(tasks), group_size=num_siblings, **sampling)
    admitted: list[Group] = []

    def on_event(event: Event) -> None:
        if event.kind is EventKind.ADMIT:
            admitted.append(event.group)
        elif event.kind is EventKind.DROP:
            raise EvaluationStalled(event.why)

    lifecycle = Lifecycle(rollout, min_valid_rewards=0, listeners=[on_event], first_group_id=FIRST_EVAL_GROUP)
    watchdog = Watchdog(config.watchdog, config.rewards.allowed_s(num_siblings), patient=False)
    waiting = iter(tasks)
    driver = Driver(
        lifecycle,
        engine,
        lambda: next(waiting, None),
        environment,
        Requests(rollout, seed, stop_token_ids, may_go_on=environment.has_turns),
        watchdog,
        config.workflow,
    )
    try:
        groups = await driver.collect(engine.oldest_version)
    except BaseException as error:
        driver.player.release(admitted)
        if isinstance(error, EvaluationStalled):
            raise ValueError(f"{error}: the evaluation is given up") from error
        raise
    assert groups is not None
    return groups


async def together(work: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Return the results of all. If one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
