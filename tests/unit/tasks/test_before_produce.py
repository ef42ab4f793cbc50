"""tasks.before_produce: a task may be changed, replaced or left out before it is admitted."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from PIL import Image

import tiny
from rollover.tasks.prompts import PromptSource, encoder
from rollover.types import Prompt, Task


class Stream:
    def __init__(self, num: int) -> None:
        self.left = [Task(f"t{i}", "test", "reward", prompt=f"say {i}") for i in range(num)]

    def next(self) -> Task | None:
        return self.left.pop(0) if self.left else None

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None: ...


def source(replace, num: int = 4) -> PromptSource:
    return PromptSource(Stream(num), encoder(tiny.tokenizer()), 100, replace)  # type: ignore[arg-type]


def everything(prompts: PromptSource) -> list[tuple[str, str]]:
    items = iter(prompts, None)
    return [(task.task_id, tiny.tokenizer().decode(prompt.ids)) for task, prompt in items]


def test_it_sees_the_version_and_its_answer_is_used() -> None:
    seen = []

    def replace(task: Task, version: int) -> Task | None:
        seen.append((task.task_id, version))
        return None if task.task_id == "t1" else dataclasses.replace(task, prompt=f"{task.prompt} at {version}")

    prompts = source(replace)
    prompts.on_step(7)
    assert everything(prompts) == [(f"t{i}", f"say {i} at 7") for i in (0, 2, 3)]
    assert seen == [(f"t{i}", 7) for i in range(4)] and prompts.num_left_out == 1
    again = source(replace, 0)
    again.load_state_dict(prompts.state_dict())
    assert again.num_left_out == 1


def test_what_is_no_task_is_refused() -> None:
    with pytest.raises(ValueError, match="before_produce.* returned .* for t0; it must return the Task"):
        source(lambda task, version: SimpleNamespace())()


def test_a_function_that_leaves_everything_out_is_named() -> None:
    with pytest.raises(ValueError, match="left out by tasks.before_produce"):
        source(lambda task, version: None, num=2000)()


def test_images_of_its_task_are_read(tmp_path) -> None:
    def replace(task: Task, version: int) -> Task:
        part = {"type": "image_url", "image_url": {"url": str(tmp_path / f"{task.task_id}.png")}}
        return dataclasses.replace(task, prompt=None, messages=({"role": "user", "content": [part]},))

    Image.new("RGB", (2, 2)).save(tmp_path / "t0.png")
    seen: list[Task] = []
    prompts = PromptSource(Stream(2), lambda task: Prompt((len(seen.append(task) or seen),)), 100, replace)  # type: ignore[arg-type]
    assert prompts() is not None and seen[0].images == [str(tmp_path / "t0.png")]
    with pytest.raises(
        ValueError, match="before_produce.* returned a Task for t1 with an image that cannot be used: .*"
    ):
        prompts()
