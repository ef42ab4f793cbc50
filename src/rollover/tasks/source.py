"""Sources of tasks: problems by number. The protocol, the inputs of a source, and the user's custom sources.

stream.py decides order, split and epochs for all kinds of sources.
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
from rollover.functions import CustomFunction, FunctionError, custom_function, described, load_function
from rollover.images import BadImage, no_media_kept
from rollover.rewards.routing import RewardChoice
from rollover.tasks.image_parts import shows_images, task_with_images
from rollover.tasks.split import Comparison, key_of, problem_text
from rollover.types import Task, content_text

_FIRST_PROBLEMS = 10  # in a fingerprint


class FailedProblem(Exception):
    """The source cannot make the problem of this number, which is skipped and counted. The message names it."""


@dataclass(frozen=True)
class SourceSetup:
    """Inputs of a source factory.

    `label`: `Task.source` of its tasks. `reward`: their reward spec. `seed`: of this source, for this side of the
    split. `held_out`: use the held-out rows that `config` names, if any (eval_path, eval_split). `chat`: tasks.chat.
    `image_urls`: tasks.allow_image_urls. `base_dir`: base of relative paths. `chosen`: rewards by data_source.
    """

    config: TaskSourceConfig
    label: str
    reward: str
    seed: int
    held_out: bool = False
    chat: bool = True
    base_dir: str | os.PathLike[str] = "."
    chosen: RewardChoice | None = None
    image_urls: bool = False

    def rewarded(self, task: Task) -> Task:
        """Return a task with the reward of its data_source, unless all tasks of the source have one reward."""
        spec = task.reward if self.chosen is None else self.chosen.spec_for(task)
        return task if spec == task.reward else replace(task, reward=spec)


def rewarded_by(task: Task, setups: Sequence[SourceSetup]) -> Task:
    """Return a saved task with the reward of its source in `setups`. ValueError if its reward is none of theirs."""
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

    `endless`: every number has a problem; else there are `num_problems`, None if they are streamed and not counted.
    """

    label: str
    endless: bool

    @property
    def num_problems(self) -> int | None: ...

    def problem(self, index: int) -> Task:
        """Return problem number `index`, equal in every call, without tasks.system_prompt and tasks.instruction.

        FailedProblem if it cannot be made; ValueError if the source cannot continue.
        """
        ...

    def together(self, index: int) -> range:
        """Return the numbers that are shuffled together with `index`; a range without it beyond the last problem."""
        ...

    @property
    def same(self) -> Comparison:
        """How problems are compared without tasks.sources.problem_key: usually `problem_text`."""
        ...

    def fingerprint(self) -> str:
        """Return a text that changes with the problems, estimated from some of them, to reject a resume on other data.
        "" if only the configuration can change them, which is compared anyway."""
        ...


class EndlessSource:
    """Base of sources whose problems depend on the configuration only."""

    endless = True
    num_problems = None

    def together(self, index: int) -> range:
        """Return the range of `index` only, since nothing is shuffled."""
        return range(index, index + 1)

    def fingerprint(self) -> str:
        """Return "": name, parameters and seed are in the configuration."""
        return ""


def column_of(task: Task, name: str, option: str) -> Any:
    """Return a column of the task; `extra_info.level` is a nested one. ValueError, with the option, if missing."""
    value: Any = task.columns
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(
                f"{option} = {name!r}: task {task.task_id} of {task.source!r} has no such column; its columns are"
                f" {', '.join(task.columns) or 'none'}. Correct it, or add the column to the data"
            )
        value = value[part]
    return value


def order_value(source: TaskSource, number: int, order_column: str) -> float:
    """Return the sort key of a problem (tasks.sources.order_column). Failed problems come first.

    ValueError for a missing column, or a value that is no number.
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
    """Yield the problems of a finite source, in order: all, or the first `at_most`. Stores no images."""
    numbers = itertools.takewhile(lambda i: i in source.together(i), itertools.count())
    for index in itertools.islice(numbers, at_most):
        try:
            with no_media_kept():
                problem = source.problem(index)
        except FailedProblem:
            continue
        yield problem


def all_together(index: int, num_problems: int | None) -> range:
    """Return TaskSource.together for a source that shuffles all its problems; `num_problems` None: it is endless."""
    return range(index, index + 1) if num_problems is None else range(num_problems)


def fingerprint_of(source: TaskSource) -> str:
    """Return TaskSource.fingerprint from the number of problems and the texts of the first ones."""
    texts = [problem.content for problem in problems_of(source, _FIRST_PROBLEMS)]
    number = "endless" if source.endless else f"{source.num_problems} problems"
    return f"{number}, {key_of(json.dumps(texts)):016x}"


_KEY = "tasks.sources.kind"
_MAX_LENGTH = 100_000_000  # their numbers are shuffled in memory


def build_source(setup: SourceSetup) -> TaskSource:
    """Build the source that `setup.config.kind` names. ValueError for an invalid one."""
    return load_function(setup.config.about.make, ".")(setup)


class CustomSource:
    """The user's source: a function makes, of a SourceSetup, an object with `problem(index)`, which returns a Task or
    raises FailedProblem, and with a length if it is finite."""

    def __init__(self, setup: SourceSetup) -> None:
        self.label, self.spec = setup.label, setup.config.kind
        make = custom_function(_KEY, self.spec, "an object with problem(index), and a length if its problems end")
        made = make(setup)
        if not callable(getattr(made, "problem", None)):
            raise make.refused(f"a {type(made).__name__} without a method problem")
        self.endless = not hasattr(made, "__len__")
        self.num_problems = None if self.endless else _length(made, make)
        self.same = problem_text
        self._problem = CustomFunction(made.problem, _KEY, self.spec, "a Task for every number below its length")

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
        if (why := _task_error(problem)) is not None:
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


def _length(made: Any, make: CustomFunction) -> int:
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


def _task_error(problem: Task) -> str | None:
    """Return what is wrong with a task of a custom source, or None."""
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
    """Return, by label of a source, the name of its held-out set: that of its held-out file, if it has one."""
    files = [s.model_copy(update={"path": s.eval_path}) if s.eval_path else s for s in sources]
    return dict(zip(labels_of(sources), labels_of(files), strict=True))


def labels_of(sources: list[TaskSourceConfig]) -> list[str]:
    """Return a label for each source, for task ids and metrics: its name, a dataset's file name, or the name of the
    user's function. Repeated ones get #2, #3, ... ValueError for a source without a name."""
    labels: list[str] = []
    for number, source in enumerate(sources):
        if missing := source.missing:
            raise ValueError(f"tasks.sources[{number}].{missing} is not set: kind = {source.kind!r} needs it")
        named = PurePosixPath(source.path).name.partition(".")[0] or source.kind.rpartition(":")[2]
        name = source.name or named
        taken = itertools.chain([name], (f"{name}#{n}" for n in itertools.count(2)))
        labels.append(next(label for label in taken if label not in labels))
    return labels
