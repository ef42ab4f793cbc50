"""Checks that every source of tasks passes, of whatever kind, and how a source of one's own is taken into them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollover.config import RewardsConfig, TasksConfig, TaskSourceConfig
from rollover.config.tasks import SOURCES
from rollover.live_objects import hold, release
from rollover.tasks.source import SourceSetup, TaskSource, build_source, problems_of
from rollover.tasks.split import SplitName
from rollover.tasks.stream import TaskStream
from rollover.types import Task

ROWS = [{"prompt": f"count to {i}", "answer": str(i)} for i in range(60)]
OWN = """
from rollover.tasks.source import FailedProblem
from rollover.types import Task

class Endless:
    def __init__(self, setup):
        self.setup, self.step = setup, setup.config.params.get("step", 1)

    def problem(self, index):
        if index % 7 == 3:
            raise FailedProblem(f"{self.setup.label} has no problem {index}")
        number = index * self.step
        return Task(f"{self.setup.label}/{index}", self.setup.label, self.setup.reward,
                    prompt=f"{number} + 1 =", columns={"answer": str(number + 1)})

class Finite(Endless):
    def __len__(self):
        return 60
"""


def rows_file(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A data set of the hub: what the library returns for one, without the network."""
    import datasets

    monkeypatch.chdir(folder)
    real = datasets.load_dataset

    def load(path: str, **options: Any) -> Any:
        return datasets.Dataset.from_list(ROWS) if path == "owner/numbers" else real(path, **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return {"kind": "dataset", "path": "owner/numbers"}


def live(rows: Any, held: list[str]) -> dict[str, Any]:
    held.append(hold(rows, "tasks"))
    return {"kind": "dataset", "path": held[-1]}


def own(folder: Path, name: str) -> dict[str, Any]:
    (folder / "mine.py").write_text(OWN)
    return {"kind": f"{folder / 'mine.py'}:{name}", "params": {"step": 2}}


# Whose problem a run may come back to: an iterable that cannot be begun again has no second pass.
MAKERS: dict[str, Callable[[Path, pytest.MonkeyPatch, list[str]], dict[str, Any]]] = {
    "reasoning_gym": lambda folder, patch, held: {"kind": "reasoning_gym", "name": "chain_sum"},
    "rows of a file": lambda folder, patch, held: {"kind": "dataset", "path": rows_file(folder)},
    "streamed rows": lambda folder, patch, held: {"kind": "dataset", "path": rows_file(folder), "streaming": True},
    "hub": lambda folder, patch, held: hub(folder, patch),
    "live rows": lambda folder, patch, held: live(ROWS, held),
    "live iterable": lambda folder, patch, held: live(AsOften(), held),
    "own, endless": lambda folder, patch, held: own(folder, "Endless"),
    "own, with an end": lambda folder, patch, held: own(folder, "Finite"),
}


class AsOften:
    """Without a length, and begun again whenever it is asked for."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(ROWS)


@pytest.fixture(params=MAKERS)
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> Iterator[TaskSourceConfig]:
    held: list[str] = []
    yield TaskSourceConfig.model_validate(MAKERS[request.param](tmp_path, monkeypatch, held))
    for spec in held:
        release(spec)


def made(config: TaskSourceConfig, seed: int = 1) -> TaskSource:
    return build_source(SourceSetup(config, "here", "exact_match/last_line", seed))


def first(source: TaskSource, num: int = 12) -> list[Task]:
    return list(problems_of(source, num))


def test_problems_are_the_same_at_every_call_and_name_source_and_reward(config: TaskSourceConfig) -> None:
    source = made(config)
    problems = first(source)
    assert 10 <= len(problems) <= 12 and first(source) == problems == first(made(config))
    assert {p.source for p in problems} == {"here"} == {source.label}
    assert {p.reward for p in problems} == {"exact_match/last_line"}
    assert len({p.task_id for p in problems}) == len(problems) and {p.attempt for p in problems} == {0}
    for problem in problems:
        assert (problem.prompt is None) != (problem.messages is None)
        assert Task.from_json(json.loads(json.dumps(problem.to_json()))) == problem
        assert isinstance(source.same(problem), str)


def test_the_end_is_where_the_numbers_say(config: TaskSourceConfig) -> None:
    source = made(config)
    assert not (source.endless and source.num_problems is not None)
    if source.num_problems is not None:
        assert source.num_problems == 60
    known = 10_000 if source.endless else 59
    for index in (0, 5, known):
        numbers = source.together(index)
        assert index in numbers and set(numbers) <= set(range(known + 1))
    if not source.endless:
        assert 60 not in source.together(60)


def test_a_source_tells_itself_from_another(config: TaskSourceConfig, tmp_path: Path) -> None:
    mark = made(config).fingerprint()
    assert mark == made(config).fingerprint() and isinstance(mark, str)
    if config.kind in SOURCES and config.kind != "dataset":
        return  # told by the keys that make it
    other = [{"prompt": f"count from {i}", "answer": "0"} for i in range(60)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    changes = {"params": {"step": 3}} if config.kind != "dataset" else {"path": str(tmp_path / "other.jsonl")}
    assert made(config.model_copy(update=changes)).fingerprint() != mark


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_stream_of_it_goes_on_exactly(config: TaskSourceConfig, split: SplitName) -> None:
    def stream() -> TaskStream:
        tasks = TasksConfig(sources=[config], epochs=2, eval_fraction=0.3)
        return TaskStream(tasks, 3, split, rewards=RewardsConfig())

    def ids(of: TaskStream, num: int) -> list[tuple[str, int]]:
        return [(task.task_id, task.attempt) for task in itertools.islice(iter(of.next, None), num)]

    whole, begun, resumed = stream(), stream(), stream()
    expected = ids(whole, 40)
    assert len(expected) == len(set(expected)) > 10
    assert ids(begun, 9) == expected[:9]
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert ids(resumed, 31) == expected[9:]


def test_a_source_without_its_key_names_it() -> None:
    for kind, about in SOURCES.items():
        assert TaskSourceConfig(kind=kind).missing == about.needs


WRONG = {
    "return 3": "returned a int without a method problem; it must return an object with problem(index)",
    "return []": "returned a list without a method problem",
    "1 / 0": "failed: ZeroDivisionError: division by zero (wrong.py:3)",
    "return Of(0)": "returned a Of without any problem",
    "return Of(1, None)": "returned None for number 0; it must return a Task for every number below its length",
    "return Of(1, Task('t', 's', 'r'))": "returned a Task for number 0 that has not one of prompt and messages",
    "return Of(1, Task('t', 's', 'r', prompt='p', columns={'a': {1}}))": "returned columns for number 0 that are not",
    "return Of(-3)": "failed: ValueError: __len__() should return >= 0",
    "return Of('5')": "failed: TypeError: 'str' object cannot be interpreted as an integer",
    "return Of(10**30)": "failed: OverflowError: cannot fit",
    "return Of(10**11)": "returned a Of of length 100000000000, and 100000000 is the largest",
    "return Of(1, Task('t', 's', None, prompt='p'))": "returned a Task for number 0 that has None for reward",
    "return Of(1, Task('t', 's', 'r', prompt=5))": "that has 5 (int) where a text must be",
    "return Of(1, Task('t', 's', 'r', prompt='\\ud800'))": "that has a lone surrogate in its text",
    "return Of(1, Task('t', 's', 'r', prompt='p', columns=None))": "that has None for columns",
    "return Of(1, Task('t', 's', 'r', messages=['hello']))": "has messages that are no dicts with role and content",
    "return Of(1, Task('t', 's', 'r', messages=()))": "that has () (tuple) for messages",
}


@pytest.mark.parametrize("body", WRONG)
def test_one_line_says_what_is_wrong_with_a_source_of_ones_own(body: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text(
        f"from rollover.types import Task\ndef make(setup):\n    {body}\n"
        "class Of:\n    def __init__(self, num, task=None): self.num, self.task = num, task\n"
        "    def __len__(self): return self.num\n    def problem(self, index): return self.task\n"
    )
    with pytest.raises(ValueError) as caught:
        made(TaskSourceConfig(kind="wrong.py:make")).problem(0)
    assert str(caught.value).startswith("tasks.sources.kind = 'wrong.py:make'")
    assert WRONG[body] in str(caught.value) and "\n" not in str(caught.value)
