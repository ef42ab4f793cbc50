"""What is said about rewards on the console: the first failure, and scores that are all the same; and the summary."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from heard import hear
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.scorer import RewardObserver
from rollover.types import Reward, Task


class Given:
    """A Rewarder that returns what it was made with."""

    def __init__(self, rewards: Sequence[Reward | float]) -> None:
        self.rewards = [r if isinstance(r, Reward) else Reward(r) for r in rewards]

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        return [self.rewards.pop(0) for _ in requests]

    async def close(self) -> None: ...


def task(spec: str = "mine.py:reward", number: int = 0, **fields: Any) -> Task:
    values: dict[str, Any] = {"prompt": "7 + 5 =", "columns": {"answer": "12", "level": 3}} | fields
    return Task(f"rows/{number}", "rows", spec, **values)


def observe(rewards: Sequence[Reward | float], tasks: Sequence[Task], num_equal: int = 0) -> tuple[list[str], str]:
    """(what was said, the commonest error), after one group of one rollout for each task."""
    said: list[str] = hear([])
    observer = RewardObserver(Given(rewards), num_equal)
    expected = list(observer.rewarder.rewards)  # type: ignore[attr-defined]
    got = [r for t in tasks for r in asyncio.run(observer.score([ScoreRequest(t, "It is 12.")]))]
    assert got == expected, "rewards are passed on as they are"
    return said, observer.commonest_error()


def failed(text: str) -> Reward:
    return Reward(None, error=text)


def test_the_first_failure_of_each_function_is_told() -> None:
    other = "mine.py:other"
    tasks = [task(number=0), task(number=1), task(number=2), task(other, 3), task(other, 4)]
    error = "KeyError: 'x' (mine.py:7)"
    said, _ = observe([0.5, failed(error), failed("later"), failed("no"), failed("no")], tasks)
    assert len(said) == 2 and all("\n" not in line for line in said)
    assert said[0].startswith(f"reward mine.py:reward failed for task rows/1: {error}.")
    assert said[1].startswith("reward mine.py:other failed for task rows/3: no.")


def test_the_commonest_error_is_counted_without_its_numbers() -> None:
    rewards = [failed(f"KeyError: {i} (mine.py:7)") for i in range(3)] + [failed("no"), 1.0]
    _, text = observe(rewards, [task()] * 5)
    assert text == "4 of 5 rewards failed; most often (3 times): KeyError: 0 (mine.py:7)"
    assert observe([failed("no"), 1.0], [task()] * 2)[1] == "1 of 2 rewards failed; no"
    assert observe([1.0], [task()])[1] == ""


def test_equal_scores_are_logged_once_with_the_inputs() -> None:
    said, _ = observe([0.0] * 9, [task()] * 9, num_equal=4)
    assert len(said) == 1 and "\n" not in said[0]
    for part in (
        "every reward of mine.py:reward so far is 0 (4 of them)",
        "task rows/0: the answer 'It is 12.' scored 0",
        "prompts and completions as strings",
        "answer = '12', level = 3",
    ):
        assert part in said[0], said[0]
    chat = task(prompt=None, messages=({"role": "user", "content": "7 + 5 ="},))
    said, _ = observe([0.0] * 4, [chat] * 4, num_equal=4)
    assert "lists of messages" in said[0] and 'completion[-1]["content"]' in said[0]


def test_equal_scores_of_a_built_in_show_the_parsed_answer() -> None:
    said, _ = observe([0.0] * 4, [task("exact_match/boxed")] * 4, num_equal=4)
    assert "every reward of exact_match" in said[0]
    assert "read no answer by tasks.answer_rule = 'boxed'; expected is '12'" in said[0]
    said, _ = observe([0.0] * 4, [task("exact_match/last_number")] * 4, num_equal=4)
    assert "read the answer '12' by tasks.answer_rule = 'last_number'" in said[0]


def test_differing_scores_are_not_logged() -> None:
    assert observe([0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0], [task()] * 9, num_equal=4) == ([], "")
    assert observe([0.0] * 9, [task()] * 9) == ([], "")


def test_functions_are_looked_at_one_by_one() -> None:
    tasks = [task("mine.py:zero"), task("mine.py:good")] * 4
    said, _ = observe([0.0, 0.1, 0.0, 0.2, 0.0, 0.3, 0.0, 0.4], tasks, num_equal=4)
    assert len(said) == 1 and "mine.py:zero" in said[0]
