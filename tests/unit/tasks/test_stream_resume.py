"""A resumed stream of tasks: the same one or none, every task once, and the end stays the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from rollover.config import RewardsConfig, TasksConfig
from rollover.tasks.prompts import PromptSource, encoder
from rollover.tasks.stream import TaskStream


def write(folder: Path, prompts: list[Any]) -> None:
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))


def stream(folder: Path, seed: int = 0, **tasks: Any) -> TaskStream:
    source = {"kind": "dataset", "path": str(folder / "tasks.jsonl")}
    config = TasksConfig.model_validate({"sources": [source], "eval_fraction": 0.001} | tasks)
    return TaskStream(config, seed=seed, split="train", rewards=RewardsConfig())


PROMPTS = [f"count to {i}" for i in range(20)]


@pytest.mark.parametrize(
    ("rows", "seed", "tasks", "what"),
    [
        (PROMPTS + ["one more"], 0, {}, "the data of tasks.sources.0 is not what it was"),
        (PROMPTS[::-1], 0, {}, "the data of tasks.sources.0 is not what it was"),
        (PROMPTS, 1, {}, "run.seed is not what it was"),
        (PROMPTS, 0, {"shuffle": False}, "tasks.shuffle is not what it was"),
        (PROMPTS, 0, {"eval_fraction": 0.2}, "tasks.eval_fraction is not what it was"),
        (PROMPTS, 0, {}, ""),
    ],
)
def test_another_stream_is_refused(tmp_path: Path, rows: list[str], seed: int, tasks: dict, what: str) -> None:
    write(tmp_path, PROMPTS)
    first = stream(tmp_path)
    first.take(5)
    state = json.loads(json.dumps(first.state_dict()))
    write(tmp_path, rows)
    other = stream(tmp_path, seed, **tasks)
    if what:
        with pytest.raises(ValueError, match=f"{what}.*would be repeated or skipped"):
            other.load_state_dict(state)
    else:
        other.load_state_dict(state)
        assert [t.task_id for t in other.take(5)] == [t.task_id for t in first.take(5)]


def test_a_task_that_fails_is_not_passed_over(tmp_path: Path) -> None:
    """Its error ends the run, and a resumed one comes to it again."""
    write(tmp_path, PROMPTS[:4])
    failing = True

    def replace(task: Any, version: int) -> Any:
        if failing and task.task_id == "tasks/2":
            raise ValueError("the row is broken")
        return task

    prompts = PromptSource(stream(tmp_path, shuffle=False), encoder(tiny.tokenizer(), None), 100, replace)
    seen = [prompts() for _ in range(2)]
    with pytest.raises(ValueError, match="the row is broken"):
        prompts()
    resumed = PromptSource(stream(tmp_path, shuffle=False), encoder(tiny.tokenizer(), None), 100, replace)
    resumed.load_state_dict(json.loads(json.dumps(prompts.state_dict())))
    failing = False
    seen += [resumed() for _ in range(2)]
    assert [item[0].task_id for item in seen if item] == [f"tasks/{i}" for i in range(4)]


def test_an_ended_stream_stays_at_its_end_unless_there_are_more_epochs(tmp_path: Path) -> None:
    write(tmp_path, PROMPTS[:3])
    first = stream(tmp_path, epochs=1)
    assert len(first.take(9)) == 3 and first.next() is None
    state = first.state_dict()
    same, more = stream(tmp_path, epochs=1), stream(tmp_path, epochs=2)
    same.load_state_dict(state)
    more.load_state_dict(state)
    assert same.next() is None
    assert [t.attempt for t in more.take(9)] == [1, 1, 1]
