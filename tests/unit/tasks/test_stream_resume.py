"""A resumed stream of tasks: the same one or none, every task once, and the end stays the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from rollover.config import Config, RewardsConfig, TasksConfig
from rollover.tasks.curriculum import build_curriculum
from rollover.tasks.prompts import PromptSource, encoder
from rollover.tasks.stream import TaskStream
from rollover.types import Group, Prompt


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

    prompts = PromptSource(stream(tmp_path, shuffle=False), encoder(tiny.tokenizer()), 100, replace)
    seen = [prompts() for _ in range(2)]
    with pytest.raises(ValueError, match="the row is broken"):
        prompts()
    resumed = PromptSource(stream(tmp_path, shuffle=False), encoder(tiny.tokenizer()), 100, replace)
    resumed.load_state_dict(json.loads(json.dumps(prompts.state_dict())))
    failing = False
    seen += [resumed() for _ in range(2)]
    assert [item[0].task_id for item in seen if item] == [f"tasks/{i}" for i in range(4)]


def rows_by(folder: Path, levels: list[Any], **tasks: Any) -> TaskStream:
    rows = [{"prompt": f"count to {i}", "answer": "1", "info": {"level": level}} for i, level in enumerate(levels)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "dataset", "path": str(folder / "tasks.jsonl"), "order_column": "info.level"}
    return stream(folder, sources=[source], **tasks)


def test_rows_come_in_the_order_of_a_column_and_go_on_in_it(tmp_path: Path) -> None:
    levels = [i % 4 / 2 for i in range(20)]
    first = rows_by(tmp_path, levels, epochs=2)
    numbers = [int(t.task_id.rpartition("/")[2]) for t in first.take(7)]
    again = rows_by(tmp_path, levels, epochs=2)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    numbers += [int(t.task_id.rpartition("/")[2]) for t in again.take(99)]
    one, other = numbers[:20], numbers[20:]
    for of in (one, other):
        assert sorted(of) == list(range(20)) and [levels[i] for i in of] == sorted(levels)
    assert one != other, "those that are alike are shuffled in each pass"
    in_order = rows_by(tmp_path, levels, shuffle=False).take(20)
    assert [t.task_id for t in in_order] == [f"tasks/{i}" for i in sorted(range(20), key=lambda i: (levels[i], i))]


@pytest.mark.parametrize(
    ("levels", "said"), [(["7/8"] * 2, "has '7/8' there; expected a number"), ([1, None], "has None")]
)
def test_a_row_without_a_number_to_order_it_by_is_named(tmp_path: Path, levels: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"order_column = 'info.level': task tasks/. {said}"):
        rows_by(tmp_path, levels).next()


def test_a_stream_has_no_order(tmp_path: Path) -> None:
    source = {"kind": "dataset", "path": "x.jsonl", "order_column": "level", "streaming": True}
    with pytest.raises(ValueError, match="order_column with streaming: all rows would have to be read"):
        Config.model_validate({"tasks": {"sources": [source]}})


def test_a_task_that_fails_leaves_no_trace_in_a_curriculum(tmp_path: Path) -> None:
    write(tmp_path, PROMPTS[:4])
    config = Config.model_validate({"tasks": {"curriculum": {"kind": "buckets", "easy_weight": 0.0}}})
    curriculum = build_curriculum(config)
    assert curriculum is not None
    source = {"kind": "dataset", "path": str(tmp_path / "tasks.jsonl")}
    tasks = TasksConfig.model_validate({"sources": [source], "eval_fraction": 0.001, "shuffle": False})
    first = TaskStream(tasks, 0, "train", rewards=RewardsConfig(), curriculum=curriculum)
    easy = first.take(2)[0]
    curriculum.saw(Group(0, easy, Prompt((1,)), []), 1.0)
    curriculum.on_step(1)

    def replace(task: Any, version: int) -> Any:
        if task.task_id == "tasks/1":
            raise ValueError("the row is broken")
        return task

    prompts = PromptSource(first, encoder(tiny.tokenizer()), 100, replace, curriculum=curriculum)
    assert [prompts() is not None for _ in range(2)] == [True, True]
    before = curriculum.metrics(), curriculum.state_dict()
    with pytest.raises(ValueError, match="the row is broken"):
        prompts()  # task 0 is passed over before it
    assert (curriculum.metrics(), curriculum.state_dict()) == before


def test_ended_stream_continues_only_with_more_epochs(tmp_path: Path) -> None:
    write(tmp_path, PROMPTS[:3])
    first = stream(tmp_path, epochs=1)
    assert len(first.take(9)) == 3 and first.next() is None
    state = first.state_dict()
    same, more = stream(tmp_path, epochs=1), stream(tmp_path, epochs=2)
    same.load_state_dict(state)
    more.load_state_dict(state)
    assert same.next() is None
    assert [t.attempt for t in more.take(9)] == [1, 1, 1]
