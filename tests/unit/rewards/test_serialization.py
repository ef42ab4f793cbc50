"""Reward functions that a program handed over: in the worker's process, as they are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rollover.config import RewardsConfig
from rollover.live_objects import hold, name_of, release
from rollover.rewards.built_in import composite_spec
from rollover.rewards.pool import RewardPool
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.worker import RewardProbeError
from rollover.types import Reward, Task

FACTOR = 3


def scored(function: Any, *completions: str, rounds: int = 1) -> list[Reward]:
    """What the pool makes of it, for completions of one task with the answer "4"."""
    held = [hold(one, name_of(one)) for one in function] if isinstance(function, tuple) else [hold(function, "reward")]
    spec = composite_spec([{"function": one} for one in held]) if isinstance(function, tuple) else held[0]
    task = Task("t", "tasks", spec, prompt="2 + 2 =", columns={"answer": "4"})

    async def ask() -> list[Reward]:
        pool = RewardPool(RewardsConfig(num_workers=1))
        try:
            await pool.probe(task)
            for _ in range(rounds):
                rewards = await pool.score([ScoreRequest(task, text, (1,)) for text in completions])
            return rewards
        finally:
            await pool.close()

    try:
        return asyncio.run(ask())
    finally:
        for one in held:
            release(one)


def scores(function: Any, *completions: str) -> list[float | None]:
    return [reward.score for reward in scored(function, *completions)]


def closure(weight: float) -> Callable[..., Any]:
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return weight * (ground_truth in solution_str)

    return compute_score


def of_module(prompts, completions, answer, **columns):
    return [float(FACTOR * (a in c)) for a, c in zip(answer, completions, strict=True)]


class Counted:
    """Its state is of the worker's copy, which keeps it between calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompts, completions, **columns):
        self.calls += 1
        return [float(self.calls)] * len(completions)


async def awaited(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return float(ground_truth in solution_str)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            lambda completions, answer, **_: [float(a in c) for a, c in zip(answer, completions, strict=True)],
            [1.0, 0.0],
        ),
        (closure(0.25), [0.25, 0.0]),
        (of_module, [3.0, 0.0]),
        (awaited, [1.0, 0.0]),
    ],
    ids=["lambda", "closure", "of a module", "async"],
)
def test_it_scores_in_the_worker(function: Any, expected: list[float]) -> None:
    assert scores(function, "It is 4.", "It is 5.") == expected


def test_its_state_is_of_the_worker_alone() -> None:
    counted = Counted()
    (reward,) = scored(counted, "x", rounds=3)
    assert reward.score == 5.0 and counted.calls == 0  # two calls of the probe, and three


def test_several_are_summed_and_told_apart() -> None:
    def correct(completions, answer, **_):
        return [float(a in c) for a, c in zip(answer, completions, strict=True)]

    def number(data_source, solution_str, ground_truth, extra_info):
        return float(solution_str.strip("It is.") == ground_truth)

    def short(data_source, solution_str, ground_truth, extra_info):
        return 0.5 if len(solution_str) < 3 else None

    right, wrong = scored((correct, short, number, awaited), "4", "It is 5.")
    assert right == Reward(3.5, {"correct": 1.0, "short": 0.5, "number": 1.0, "awaited": 1.0})
    assert wrong == Reward(0.0, {"correct": 0.0, "number": 0.0, "awaited": 0.0}), "None does not apply"


def test_several_are_missing_where_one_fails() -> None:
    def fails(data_source, solution_str, ground_truth, extra_info):
        return 1.0 if solution_str.startswith(("It", "The")) else 1 / 0

    good, bad = scored((fails, of_module), "It is 4.", "4")
    assert good.score == 4.0 and good.extras == {"fails": 1.0, "of_module": 3.0}
    assert bad.missing and bad.error is not None and bad.error.startswith("fails: ZeroDivisionError: ")
    none = scored((lambda completions, **_: [None for _ in completions],) * 2, "x")[0]
    assert none.missing


def test_one_that_cannot_be_copied_fails_with_the_cure() -> None:
    lock = threading.Lock()
    with pytest.raises(
        RewardProbeError, match=r"cannot travel to its worker process.*It uses lock \(lock\).*first called"
    ):
        scored(lambda completions, **_: [float(lock.locked()) for _ in completions], "x")
