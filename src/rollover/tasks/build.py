"""The source of tasks that tasks.sources.kind names: a built-in one, or a function of the user's own that makes one.

Owns the labels of sources, and what is said of a source of the user's own that breaks the rules.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from rollover.config import TaskSourceConfig
from rollover.functions import FunctionError, OwnFunction, described, load_function, own_function
from rollover.images import BadImage
from rollover.tasks.image_parts import shows_images, task_with_images
from rollover.tasks.same import problem_text
from rollover.tasks.source import FailedProblem, SourceSetup, TaskSource, all_together, fingerprint_of
from rollover.types import Task, content_text

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
