"""Streaming micro-batches: the gradient of groups that are READY, while the rest of their step is generated or scored.

    driver.collect ──────────────────────────────▶ all groups of the step ──▶ batches.build ──▶ trainer.train_step
          └── reserve ──▶ groups with a signal ──▶ trainer.accumulate ──────── the rest of it, and one update ──┘

Nothing is trained earlier than without it: weights change once, when all gradients of the step are there, so tokens get
no staler. Owns nothing between two steps. Which groups come first depends on what is ready, hence on the order of
arrival; the sum is the same up to rounding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollover.rollout.driver import Driver
from rollover.trainer.step_batch import StepBatchBuilder
from rollover.trainer.trainer import Trainer
from rollover.types import Group

Beside = Callable[[Callable[[], None]], Awaitable[None]]


async def collect_and_accumulate(
    driver: Driver, batches: StepBatchBuilder, trainer: Trainer, version: int, min_groups: int, beside: Beside
) -> list[Group] | None:
    """`driver.collect(version)`; meanwhile the trainer's work on every `min_groups` groups that are ready.

    After a stop (None) or an error nothing of it is left: the groups stay in the cache, the gradient is forgotten.
    """
    collecting = asyncio.ensure_future(driver.collect(version))
    try:
        while not collecting.done():
            reserved = driver.lifecycle.scheduler.reserve(version, min_groups)
            groups = [driver.lifecycle.cache.groups[group_id] for group_id in reserved]
            if groups:
                samples = batches.with_signal(groups, version)
                await beside(lambda samples=samples: trainer.accumulate(samples))
            else:
                arrival = asyncio.ensure_future(driver.next_ready())
                await asyncio.wait([collecting, arrival], return_when=asyncio.FIRST_COMPLETED)
                arrival.cancel()
        collected = collecting.result()
    except BaseException:
        collecting.cancel()
        await asyncio.wait([collecting])
        _forget(driver, trainer)
        raise
    if collected is None:
        _forget(driver, trainer)
    return collected


def _forget(driver: Driver, trainer: Trainer) -> None:
    driver.lifecycle.scheduler.forget_reserved()
    trainer.forget_accumulated()
