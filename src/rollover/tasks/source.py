"""What a source of tasks is: problems by number, and what the stream must know of them.

Owns the protocol, and what a source is made from. Never decides an order, a side of the split or an epoch: stream.py
does, for every kind alike.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Protocol

from rollover.config import TaskSourceConfig
from rollover.functions import FunctionError, OwnFunction, described, load_function, own_function
from rollover.images import BadImage, no_media_kept
from rollover.rewards.routing import Chosen
from rollover.tasks.image_parts import shows_images, task_with_images
from rollover.tasks.split import Same, key_of, problem_text
from rollover.types import Task, content_text

_FIRST_PROBLEMS = 10  # by which it is told whether a source is the one of before


class FailedProblem(Exception):
    """There is no problem under this number: it is left out, and counted. The text says which, and why."""


@dataclass(frozen=True)
class SourceSetup:
    """What a source is made from.

    Every task of it carries `label` as its `source`, and `reward`. `seed`: of this source, for this side of the split.
    `held_out`: the rows that are named as held out are wanted, where `config` names some (eval_path, eval_split).
    `chat`: tasks.chat; `image_urls`: tasks.allow_image_urls. Relative paths are relative to `base_dir`. `chosen`: where
    data_source may give another reward.
    """

    config: TaskSourceConfig
    label: str
    reward: str
    seed: int
    held_out: bool = False
    chat: bool = True
    base_dir: str | os.PathLike[str] = "."
    chosen: Chosen | None = None
    image_urls: bool = False

    def rewarded(self, task: Task) -> Task:
        """A task of the source with the reward that its data_source has, where none is named for all of them."""
        spec = task.reward if self.chosen is None else self.chosen.of(task)
        return task if spec == task.reward else replace(task, reward=spec)


def rewarded_by(task: Task, setups: Sequence[SourceSetup]) -> Task:
    """Return a saved task with the reward that its source has in `setups`. ValueError where it has none of theirs."""
    for setup in setups:
        if setup.label == task.source:
            return setup.rewarded(task)
    if task.reward not in {setup.reward for setup in setups}:
        raise ValueError(
            f"--resume: no source has the reward {task.reward!r} of the task {task.task_id!r}: set it back"
        )
    return task


class TaskSource(Protocol):
    """Problems by number: 0, 1, 2, ...

    `endless`: every number has a problem. Else `num_problems` says how many there are; it is None where they are
    streamed, and nobody has counted them.
    """

    label: str
    endless: bool

    @property
    def num_problems(self) -> int | None: ...

    def problem(self, index: int) -> Task:
        """Problem number `index`, the same at every call, without tasks.system_prompt and tasks.instruction.
        FailedProblem where there is none under this number; ValueError where the source cannot go on."""
        ...

    def together(self, index: int) -> range:
        """The numbers that are shuffled among each other, `index` being one of them. Where `index` lies behind the last
        problem, a range that does not have it."""
        ...

    @property
    def same(self) -> Same:
        """How its problems are compared where tasks.sources.problem_key is not set: `problem_text`, unless the source
        knows something better."""
        ...

    def fingerprint(self) -> str:
        """A text that changes when the problems do, as far as some of them show it: a run is not resumed on other
        problems. "" where only keys of the configuration can change them, which are compared in any case."""
        ...


class EndlessSource:
    """The part of a TaskSource that is the same for all whose problems are made of the configuration alone."""

    endless = True
    num_problems = None

    def together(self, index: int) -> range:
        """`index` alone, as nothing is shuffled."""
        return range(index, index + 1)

    def fingerprint(self) -> str:
        """ "": all depends on name, parameters and seed, which are in the configuration."""
        return ""


def column_of(task: Task, name: str, option: str) -> Any:
    """A column of the task; `extra_info.level` is one in a table. ValueError, which names the option, without it."""
    value: Any = task.columns
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(
                f"{option} = {name!r}: task {task.task_id} of {task.source!r} has no such column; its columns are"
                f" {', '.join(task.columns) or 'none'}. Correct it, or add the column to the data"
            )
        value = value[part]
    return value


def place_of(source: TaskSource, number: int, order_column: str) -> float:
    """By what a problem is put in order (tasks.sources.order_column). One that its source fails to make is first.

    ValueError without the column, or for what is no number.
    """
    try:
        problem = source.problem(number)
    except FailedProblem:
        return -math.inf
    place = column_of(problem, order_column, "tasks.sources.order_column")
    if isinstance(place, bool) or not isinstance(place, int | float) or math.isnan(place):
        raise ValueError(
            f"tasks.sources.order_column = {order_column!r}: task {problem.task_id} has {place!r} there; expected a"
            " number"
        )
    return place


def problems_of(source: TaskSource, at_most: int | None = None) -> Iterator[Task]:
    """The problems of a source that has an end, in order: all of them, or the first `at_most`."""
    numbers = itertools.takewhile(lambda i: i in source.together(i), itertools.count())
    for index in itertools.islice(numbers, at_most):
        try:
            with no_media_kept():  # who looks at all of them needs no copy of their images
                problem = source.problem(index)
        except FailedProblem:
            continue
        yield problem


def all_together(index: int, num_problems: int | None) -> range:
    """As TaskSource.together, where all of so many problems are shuffled; None: each of endless ones for itself."""
    return range(index, index + 1) if num_problems is None else range(num_problems)


def fingerprint_of(source: TaskSource) -> str:
    """As TaskSource.fingerprint: of how many problems there are, and of the texts of the first ones."""
    texts = [problem.content for problem in problems_of(source, _FIRST_PROBLEMS)]
    number = "endless" if source.endless else f"{source.num_problems} problems"
    return f"{number}, {key_of(json.dumps(texts)):016x}"


_KEY = "tasks.sources.kind"
_MAX_LENGTH = 100_000_000  # their numbers are shuffled in memory


def build_source(setup: SourceSetup) -> TaskSource:
    """The source that `setup.config.kind` names. ValueError where it cannot be used."""
    return load_function(setup.config.about.make, ".")(setup)


class OwnSource:
    """What a function of the user's own made of a SourceSetup: an object with `problem(index)`, which returns a Task
    (or raises FailedProblem), and with a length if its problems end."""

    def __init__(self, setup: SourceSetup) -> None:
        self.label, self.spec = setup.label, setup.config.kind
        make = own_function(_KEY, self.spec, "an object with problem(index), and a length if its problems end")
        made = make(setup)
        if not callable(getattr(made, "problem", None)):
            raise make.refused(f"a {type(made).__name__} without a method problem")
        self.endless = not hasattr(made, "__len__")
        self.num_problems = None if self.endless else _length(made, make)
        self.same = problem_text
        self._problem = OwnFunction(made.problem, _KEY, self.spec, "a Task for every number below its length")

    def problem(self, index: int) -> Task:
        try:
            problem = self._problem(index)
        except FunctionError as error:
            if isinstance(error.__cause__, FailedProblem):
                raise error.__cause__ from None
            raise
        if not isinstance(problem, Task):
            raise self._problem.refused(f"{described(problem)} for number {index}")
        problem = self._with_images(problem, index)
        if (why := _why_no_task(problem)) is not None:
            raise self._problem.refused(f"a Task for number {index} that {why}")
        try:
            json.dumps(problem.columns)
        except (TypeError, ValueError) as error:
            raise self._problem.refused(f"columns for number {index} that are not JSON ({error})") from error
        return problem

    def _with_images(self, problem: Task, index: int) -> Task:
        try:
            return task_with_images(problem)
        except BadImage as error:
            raise self._problem.refused(
                f"a Task for number {index} with an image that cannot be used: {error}"
            ) from error

    def together(self, index: int) -> range:
        return all_together(index, self.num_problems)

    def fingerprint(self) -> str:
        return fingerprint_of(self)


def _length(made: Any, make: OwnFunction) -> int:
    try:
        num = len(made)
    except (Exception, SystemExit) as error:  # boundary: the user's source
        raise make.failed(error) from error
    if num == 0:
        raise make.refused(f"a {type(made).__name__} without any problem (its length is 0)")
    if num > _MAX_LENGTH:
        raise make.refused(
            f"a {type(made).__name__} of length {num}, and {_MAX_LENGTH} is the largest (without one it is endless)"
        )
    return num


def _why_no_task(problem: Task) -> str | None:
    """Why it can be no task of a source; None: it can."""
    for name in ("task_id", "source", "reward"):
        if not isinstance(value := getattr(problem, name), str):
            return f"has {described(value)} for {name}"
    if (problem.prompt is None) == (problem.messages is None):
        return "has not one of prompt and messages"
    texts: list[Any] = [problem.prompt]
    if problem.messages is not None:
        if not (isinstance(problem.messages, list | tuple) and problem.messages):
            return f"has {described(problem.messages)} for messages"
        if not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in problem.messages):
            return "has messages that are no dicts with role and content"
        contents = [m["content"] for m in problem.messages]
        texts = [m["role"] for m in problem.messages]
        texts += [content_text(c) if shows_images(c) else c for c in contents]
    for text in texts:
        if not isinstance(text, str):
            return f"has {described(text)} where a text must be"
        if any("\ud800" <= c <= "\udfff" for c in text):
            return "has a lone surrogate in its text, which is no character"
    return None if isinstance(problem.columns, Mapping) else f"has {described(problem.columns)} for columns"


def held_out_names(sources: list[TaskSourceConfig]) -> dict[str, str]:
    """The label of each source -> the name for what is held out of it: that of its held-out file, if it has one."""
    files = [s.model_copy(update={"path": s.eval_path}) if s.eval_path else s for s in sources]
    return dict(zip(labels_of(sources), labels_of(files), strict=True))


def labels_of(sources: list[TaskSourceConfig]) -> list[str]:
    """A label per source, for task ids and metrics: its name, a dataset's file name, or that of the user's own
    function; a repeated one gets #2, #3, ... ValueError for a source without what names it."""
    labels: list[str] = []
    for number, source in enumerate(sources):
        if missing := source.missing:
            raise ValueError(f"tasks.sources[{number}].{missing} is not set: kind = {source.kind!r} needs it")
        named = PurePosixPath(source.path).name.partition(".")[0] or source.kind.rpartition(":")[2]
        name = source.name or named
        taken = itertools.chain([name], (f"{name}#{n}" for n in itertools.count(2)))
        labels.append(next(label for label in taken if label not in labels))
    return labels
