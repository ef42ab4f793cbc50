"""Tasks that a program handed over as lists, data sets and iterables, through the stream of tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from rollover.config import RewardsConfig, TasksConfig, TaskSourceConfig
from rollover.live_objects import hold, release
from rollover.tasks.rows import WINDOW, LiveStream, LiveTable, live_rows
from rollover.tasks.stream import TaskStream

ROWS = [{"prompt": f"count to {i}", "answer": str(i)} for i in range(100)]


@pytest.fixture
def stream() -> Iterator[Any]:
    specs = []

    def make(rows: Any, split: str = "train", eval_rows: Any = None, **tasks: Any) -> TaskStream:
        specs.append(hold(live_rows(rows), "tasks"))
        source = {"kind": "dataset", "name": "tasks", "path": specs[-1], **tasks.pop("source", {})}
        if eval_rows is not None:
            specs.append(hold(live_rows(eval_rows), "eval_tasks"))
            source["eval_path"] = specs[-1]
        config = TasksConfig(sources=[TaskSourceConfig(**source)], **tasks)
        return TaskStream(config, 0, split, rewards=RewardsConfig())  # type: ignore[arg-type]

    yield make
    for spec in specs:
        release(spec)


def prompts(stream: TaskStream, num: int) -> list[str]:
    return [task.messages[-1]["content"] for task in itertools.islice(iter(stream.next, None), num)]


def endless() -> Iterator[dict[str, str]]:
    for i in itertools.count():
        yield {"prompt": f"count to {i}", "answer": str(i)}


def test_a_list_is_a_data_set_with_a_held_out_split(stream: Any) -> None:
    train, held_out = stream(ROWS, epochs=1, eval_fraction=0.3), stream(ROWS, "eval", eval_fraction=0.3)
    trained, evaluated = prompts(train, 1000), prompts(held_out, 1000)
    assert len(trained) + len(evaluated) == 100 and not set(trained) & set(evaluated) and len(evaluated) > 15
    assert trained != sorted(trained, key=lambda p: int(p.split()[-1])), "shuffled"


def test_rows_may_lack_what_others_have(stream: Any) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2", "hint": "two"}]
    assert LiveTable(rows)[0] == {"prompt": "a", "answer": "1", "hint": None}
    tasks = {task.task_id: task.columns for task in iter(stream(rows, epochs=1, eval_fraction=0.001).next, None)}
    assert tasks == {"tasks/0": {"answer": "1", "hint": None}, "tasks/1": {"answer": "2", "hint": "two"}}


def test_iterable_has_one_pass_and_resumes(stream: Any) -> None:
    eval_rows = [{"prompt": "count to 3", "answer": "3"}]
    first = stream(endless(), eval_rows=eval_rows)
    assert prompts(first, 5) == [f"count to {i}" for i in (0, 1, 2, 4, 5)], "3 is held out"
    again = stream(endless(), eval_rows=eval_rows)
    again.load_state_dict(first.state_dict())
    assert prompts(again, 3) == [f"count to {i}" for i in (6, 7, 8)]
    assert prompts(stream(endless(), "eval", eval_rows=eval_rows), 9) == ["count to 3"]


def test_a_finite_iterable_ends(stream: Any) -> None:
    one = stream(iter(ROWS[:7]), eval_fraction=0.001, epochs=1)
    assert len(prompts(one, 100)) == 7 and one.next() is None
    later = stream(iter(ROWS[:7]), eval_fraction=0.001, epochs=1)
    later.load_state_dict(one.state_dict())
    assert later.next() is None


def test_a_short_iterable_is_passed_over_again_from_memory(stream: Any) -> None:
    two = stream(iter(ROWS[:3]), eval_fraction=0.001)
    tasks = list(itertools.islice(iter(two.next, None), 6))
    assert [t.attempt for t in tasks] == [0, 0, 0, 1, 1, 1] and tasks[0].task_id == tasks[3].task_id


def test_what_was_looked_at_is_asked_for_again() -> None:
    rows = LiveStream(endless())
    assert rows.columns == ["prompt", "answer"] and rows.num_rows is None
    assert rows[WINDOW]["answer"] == str(WINDOW) and rows[1]["answer"] == "1"
    with pytest.raises(ValueError, match="row 0 of the iterable of tasks is needed again"):
        _ = rows[0]

    class Again:
        def __iter__(self) -> Iterator[dict[str, str]]:
            return endless()

    rows = LiveStream(Again())
    assert rows[WINDOW + 5]["answer"] == str(WINDOW + 5) and rows[0]["answer"] == "0"


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "tasks is empty"), ("text", "tasks is a str"), ([3], "row 1 is a int"), (iter([]), "of tasks is empty")],
)  # fmt: skip
def test_what_holds_no_rows_is_refused(stream: Any, rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(rows)


def test_order_column_needs_a_list(stream: Any) -> None:
    rows = [row | {"level": -i} for i, row in enumerate(ROWS[:10])]
    by_level = {"order_column": "level"}
    assert prompts(stream(rows, eval_fraction=1e-9, source=by_level), 3) == ["count to 9", "count to 8", "count to 7"]
    with pytest.raises(ValueError, match=r"order_column = 'level': the rows of tasks come one by one.*as a list"):
        stream(iter(rows), source=by_level)
