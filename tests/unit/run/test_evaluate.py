"""An evaluation asks the engine as a driver does: a failure is tried again, and given up in the end, by name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import virtual_time
from rollover.config import Config
from rollover.engine.fake import FakeEngine
from rollover.engine.protocol import ExtendRequest
from rollover.rewards.protocol import ScoreRequest
from rollover.run.evaluate import EvalTasks, answers_of
from rollover.track.answers import Answer
from rollover.types import Reward, Segment, Task

CONFIG = Config.model_validate(
    {"eval": {"num_tasks": 3, "samples_per_task": 2}, "watchdog": {"max_failures": 3, "retry_s": 1}}
)
TASKS = EvalTasks([Task(f"t{i}", "s", "r", prompt="x") for i in range(3)], [(1, 2)] * 3)


class Failing(FakeEngine):
    """Fails `times` times at the rollout eval-1-0."""

    def __init__(self, times: int) -> None:
        super().__init__(lambda seed: 5 + seed % 20)
        self.left = times

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        if request.rollout_id == "eval-1-0" and self.left:
            self.left -= 1
            raise ConnectionError("connection refused")
        return await super().extend(request)


class Rewarder:
    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        return [Reward(1.0) for _ in requests]


def answers(engine: FakeEngine, said: list[str]) -> list[Answer]:
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    rewarder: Any = Rewarder()

    async def go() -> list[Answer]:
        try:
            return await answers_of(TASKS, engine, rewarder, tokenizer, CONFIG, frozenset(), said.append)
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(asyncio.all_tasks()) == 1, "rollouts were left running"

    return virtual_time.run(go())


def test_a_failure_is_tried_again() -> None:
    said: list[str] = []
    assert answers(Failing(2), said) == answers(Failing(0), [])
    assert 1 <= len(said) <= 2 and "the engine failed at rollout eval-1-0 (ConnectionError: connection" in said[0]


def test_an_engine_that_fails_again_and_again_is_named_and_nothing_is_left_running() -> None:
    with pytest.raises(ValueError, match="failed 3 times in a row at rollout eval-1-0 .*connection refused"):
        answers(Failing(99), [])
