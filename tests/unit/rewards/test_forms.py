"""The form in which a reward of TRL's signature gets prompts and completions is that of the data's column."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from rollover.config import RewardsConfig, TasksConfig, TaskSourceConfig
from rollover.rewards.pool import RewardPool
from rollover.rewards.protocol import ScoreRequest
from rollover.tasks.stream import TaskStream
from rollover.types import Reward, Task

# As docs/start.md has it; `seen` writes down what it was given.
REWARD = """
def accuracy(prompts, completions, answer, **columns):
    return [float(a in c) for a, c in zip(answer, completions)]

def seen(prompts, completions, **columns):
    import json
    return [{"score": 1.0, "ok": 1.0} if json.dumps([p, c]) == e else 0.0
            for p, c, e in zip(prompts, completions, columns["expected"])]
"""


def tasks_of(folder: Path, prompt: Any, reward: str, **options: Any) -> Task:
    (folder / "reward.py").write_text(REWARD)
    row = {"prompt": prompt, "answer": "12", **options.pop("columns", {})}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(2)))
    source = TaskSourceConfig(kind="dataset", path=str(folder / "rows.jsonl"), reward=f"{folder}/reward.py:{reward}")
    config = TasksConfig(sources=[source], eval_fraction=1e-9, **options)
    task = TaskStream(config, 0, "train", rewards=RewardsConfig()).next()
    assert task is not None
    return task


def scores(folder: Path, task: Task, completions: list[str]) -> list[float | None]:
    async def go() -> list[Reward]:
        pool = RewardPool(RewardsConfig(), folder)
        try:
            return await pool.score([ScoreRequest(task, text) for text in completions])
        finally:
            await pool.close()

    return [reward.score for reward in asyncio.run(go())]


@pytest.mark.parametrize("chat", [True, False])
def test_trls_reward_tells_right_answers_from_wrong_ones(tmp_path: Path, chat: bool) -> None:
    """With string prompts it compares strings, also where the chat template is applied."""
    task = tasks_of(tmp_path, "7 + 5 =", "accuracy", chat=chat)
    assert scores(tmp_path, task, ["It is 12.", "It is 13."]) == [1.0, 0.0]


CHAT = [{"role": "user", "content": "7 + 5 ="}]
FORMS = {
    "a string": ("7 + 5 =", {}, ["7 + 5 =", "12"]),
    "a string with an instruction": (
        "7 + 5 =",
        {"instruction": "Be brief.", "system_prompt": "You add."},
        ["7 + 5 =\nBe brief.", "12"],
    ),
    "a string as it is": ("7 + 5 =", {"chat": False}, ["7 + 5 =", "12"]),
    "messages": (CHAT, {}, [CHAT, [{"role": "assistant", "content": "12"}]]),
}


@pytest.mark.parametrize(("prompt", "options", "expected"), FORMS.values(), ids=FORMS)
def test_prompts_and_completions_have_the_form_of_the_column(
    tmp_path: Path, prompt: Any, options: dict[str, Any], expected: list[Any]
) -> None:
    task = tasks_of(tmp_path, prompt, "seen", columns={"expected": json.dumps(expected)}, **options)
    assert scores(tmp_path, task, ["12"]) == [1.0]
    restored = Task.from_json(json.loads(json.dumps(task.to_json())))
    assert restored == task and restored.reward_prompt == expected[0], "after a restart too"


def test_the_model_gets_the_chat_in_any_case(tmp_path: Path) -> None:
    task = tasks_of(tmp_path, "7 + 5 =", "accuracy", system_prompt="You add.")
    assert [m["role"] for m in task.messages or ()] == ["system", "user"] and task.prompt is None
    assert dataclasses.replace(task, plain=False).reward_prompt == list(task.messages or ())
