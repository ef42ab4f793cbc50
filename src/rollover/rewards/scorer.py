"""From rollouts to score requests: the scorer of the driver, which decodes answers and asks a Rewarder."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from itertools import groupby
from typing import Any

from rollover.config import Config
from rollover.envs.answer_text import answer_decoder
from rollover.rewards.protocol import Rewarder, ScoreRequest
from rollover.rewards.trl_arguments import TrainerState
from rollover.types import Reward, Rollout, Task


def make_scorer(
    rewarder: Rewarder, tokenizer: Any, config: Config
) -> Callable[[list[Rollout]], Awaitable[list[Reward]]]:
    """The driver's scorer: it decodes the completions of rollouts of one group and has `rewarder` score them."""

    decode = answer_decoder(tokenizer, config.rollout.keep_special_tokens)

    async def score(rollouts: list[Rollout]) -> list[Reward]:
        requests = [
            ScoreRequest(
                r.task,
                decode(ids),
                tuple(ids),
                _num_turns(r),
                trainer_state(config, r.task, max(r.versions, default=0)),
            )
            for r in rollouts
            for ids in [r.token_ids()]
        ]
        return await rewarder.score(requests)

    return score


def trainer_state(config: Config, task: Task, version: int) -> TrainerState:
    """Return the `trainer_state` of an answer to `task` whose newest token was sampled under policy `version`."""
    updates = config.train.updates_per_step
    max_steps = config.train.num_steps * updates
    return TrainerState(version * updates, max_steps, float(task.attempt), config.tasks.epochs or sys.maxsize)


def _num_turns(rollout: Rollout) -> int:
    """The prompt counts as one; segments of one turn that was interrupted count once."""
    return 1 + sum(1 for _ in groupby(segment.trainable for segment in rollout.segments))
