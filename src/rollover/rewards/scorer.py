"""From rollouts to score requests: the scorer of the driver, which decodes answers and asks a Rewarder."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from rollover.rewards.protocol import Rewarder, ScoreRequest
from rollover.types import Reward, Rollout, StopReason


def make_scorer(
    rewarder: Rewarder, tokenizer: Any, repetition_penalty: float = 0.0
) -> Callable[[list[Rollout]], Awaitable[list[Reward]]]:
    """The driver's scorer: it decodes the completions of rollouts of one group and has `rewarder` score them.

    `repetition_penalty` is subtracted from the score of a rollout that was stopped for repeating itself.
    """

    async def score(rollouts: list[Rollout]) -> list[Reward]:
        requests = [
            ScoreRequest(r.task, tokenizer.decode(ids, skip_special_tokens=True), tuple(ids))
            for r in rollouts
            for ids in [r.token_ids()]
        ]
        rewards = await rewarder.score(requests)
        return [
            replace(reward, score=reward.score - repetition_penalty)
            if reward.score is not None and rollout.stop_reason is StopReason.REPETITION
            else reward
            for rollout, reward in zip(rollouts, rewards, strict=True)
        ]

    return score
