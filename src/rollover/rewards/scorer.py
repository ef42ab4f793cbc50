"""From rollouts to score requests: the scorer of the driver, which decodes answers and asks a Rewarder."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rollover.rewards.protocol import Rewarder, ScoreRequest
from rollover.types import Reward, Rollout


def make_scorer(rewarder: Rewarder, tokenizer: Any) -> Callable[[list[Rollout]], Awaitable[list[Reward]]]:
    """The driver's scorer: it decodes the completions of rollouts of one group and has `rewarder` score them."""

    async def score(rollouts: list[Rollout]) -> list[Reward]:
        requests = [
            ScoreRequest(r.task, tokenizer.decode(ids, skip_special_tokens=True), tuple(ids))
            for r in rollouts
            for ids in [r.token_ids()]
        ]
        return await rewarder.score(requests)

    return score
