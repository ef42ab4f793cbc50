"""Environments of the user's own, played by a script: what the tests of workflow.environment share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rollover.config import Config
from rollover.envs.class_environment import ClassEnvironment
from rollover.envs.protocol import EnvironmentSetup, Keep, keeps_nothing
from rollover.live_objects import hold, release
from rollover.types import Reward, Rollout, RolloutState, SamplingParams, Segment, StopReason, Task
from unit.envs import templates

TOKENIZER = templates.tokenizer(templates.CHATML)
TASK = Task("t", "test", "reward", messages=({"role": "user", "content": "12*34?"},), columns={"answer": "408"})


async def score_by_text(rollouts: list[Rollout]) -> list[Reward]:
    """The reward function of the task."""
    return [Reward(-1.0, {"tokens": rollout.num_tokens}) for rollout in rollouts]


@contextmanager
def environment(
    made: Any, template: str = templates.CHATML, keep: Keep = keeps_nothing, **workflow: Any
) -> Iterator[ClassEnvironment]:
    """Of a class that a program handed over."""
    spec = hold(made, getattr(made, "__name__", "made"))
    rollout = {"max_new_tokens": 10_000}
    try:
        config = Config.model_validate({"workflow": {"environment": spec, **workflow}, "rollout": rollout})
        yield build(config, template, keep)
    finally:
        release(spec)


def build(config: Config, template: str = templates.CHATML, keep: Keep = keeps_nothing) -> ClassEnvironment:
    tokenizer = templates.tokenizer(template)
    setup = EnvironmentSetup(config, tokenizer, score_by_text, lambda task: False, len(tokenizer))
    return ClassEnvironment(setup, keep)


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def new_rollout(task: Task = TASK, sibling: int = 0, group_id: int = 0) -> Rollout:
    return Rollout(group_id, sibling, task, [], RolloutState.RUNNING)


def add_turn(rollout: Rollout, text: str, reason: StopReason = StopReason.EOS) -> None:
    ids = TOKENIZER(text)["input_ids"]
    if reason is StopReason.EOS:
        ids = [*ids, TOKENIZER.convert_tokens_to_ids("<|im_end|>")]
    arrays = np.array(ids, dtype=np.int32), np.full(len(ids), -1.0, dtype=np.float32)
    rollout.add(Segment(*arrays, 0, SamplingParams(), reason))
    rollout.stop_reason = reason


async def turn(env: ClassEnvironment, rollout: Rollout, text: str) -> str | None:
    """What the policy is told after a turn of this text, as it stands in the rollout; None: the episode is done."""
    add_turn(rollout, text)
    said = await env.next(rollout)
    if said is None or said.stop_reason is StopReason.ENV_DONE:
        return None
    rollout.add(said)
    return TOKENIZER.decode(said.token_ids)


async def told(env: ClassEnvironment, rollout: Rollout, text: str, role: str = "tool") -> list[str]:
    """The contents of the messages after a turn."""
    said = await turn(env, rollout, text)
    assert said is not None
    messages = said.split(f"<|im_start|>{role}\n")[1:]
    return [message.partition("<|im_end|>")[0] for message in messages]


def play(env: ClassEnvironment, *texts: str, task: Task = TASK) -> list[list[str]]:
    """What a new rollout is told after each of these turns."""

    async def all_turns() -> list[list[str]]:
        rollout = new_rollout(task)
        return [await told(env, rollout, text) for text in texts]

    return asyncio.run(all_turns())


def reward_of(env: ClassEnvironment, rollout: Rollout) -> Reward:
    async def scored() -> list[Reward]:
        return await env.score([rollout])

    (reward,) = asyncio.run(scored())
    return reward
