"""What a reward is told of a rollout."""

import asyncio
from itertools import zip_longest

import numpy as np
import pytest

from rollover.config import Config
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.registry import TrainerState
from rollover.rewards.scorer import make_scorer
from rollover.types import Prompt, Reward, Rollout, SamplingParams, Segment, StopReason, Task


class Decodes:
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


class Keeps:
    def __init__(self) -> None:
        self.requests: list[ScoreRequest] = []

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        self.requests += requests
        return [Reward(1.0)] * len(requests)

    async def close(self) -> None: ...


def rollout(*written_by: str, versions: tuple[int, ...] = (), attempt: int = 0) -> Rollout:
    def segment(who: str, version: int) -> Segment:
        ids, logprobs = np.array([5], np.int32), np.zeros(1, np.float32)
        return Segment(ids, logprobs, version, SamplingParams(), StopReason.EOS, trainable=who == "policy")

    task = Task("t", "s", "exact_match", prompt="p", attempt=attempt)
    made = Rollout(group_id=0, sibling=0, task=task, prompt=Prompt((1,)))
    for who, version in zip_longest(written_by, versions, fillvalue=0):
        made.add(segment(str(who), int(version)))
    return made


@pytest.mark.parametrize(
    ("written_by", "num_turns"),
    [
        (["policy"], 2),
        (["policy", "policy", "policy"], 2),
        (["policy", "environment", "policy", "policy"], 4),
    ],
)
def test_turns_are_counted_as_verl_counts_them(written_by: list[str], num_turns: int) -> None:
    """verl: the prompt, the turns of the assistant, and those of tools or users. An interrupted turn is one."""
    keeps = Keeps()
    asyncio.run(make_scorer(keeps, Decodes(), Config())([rollout(*written_by)]))
    (request,) = keeps.requests
    assert request.num_turns == num_turns


def test_trainer_state_follows_the_newest_version() -> None:
    config = Config.model_validate({"train": {"num_steps": 10, "minibatches_per_step": 2}, "tasks": {"epochs": 3}})
    keeps = Keeps()
    one = rollout("policy", "environment", "policy", versions=(3, 9, 4), attempt=1)
    asyncio.run(make_scorer(keeps, Decodes(), config)([one]))
    assert keeps.requests[0].trainer_state == TrainerState(8, 20, 1.0, 3)
