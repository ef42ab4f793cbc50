"""The taskset of workflow.verifiers as a source of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollover.plugins.verifiers.package import KEY, Tasks, load_tasks
from rollover.tasks.source import SourceSetup, all_together, fingerprint_of
from rollover.tasks.split import problem_text
from rollover.types import Task

_ELSEWHERE = {"idx", "prompt", "system_prompt"}  # fields that are in the task's number and messages
_COLUMN = "verifiers"  # the identity of the task in its taskset


def taskset_source(setup: SourceSetup) -> TasksetSource:
    """Return the source of the taskset `setup.config.name`."""
    config = setup.config
    held_out = setup.held_out and config.names_held_out
    params = {**config.params, **config.eval_params} if held_out else config.params
    tasks = load_tasks(config.name, params)
    if held_out and tasks.num is None:
        raise ValueError(
            f"{KEY}_eval: the taskset {config.name!r} has no end with {params}: it is unknown what is held out"
        )
    return TasksetSource(tasks, params, setup.label, setup.reward)


def reload_task(taskset: str, task: Task) -> Any:
    """Return the verifiers Task of `task`. ValueError if the taskset has changed."""
    which = task.columns[_COLUMN]
    tasks = load_tasks(taskset, which["params"])
    if not tasks.has(which["index"]) or (found := tasks[which["index"]]).hash != which["hash"]:
        raise ValueError(f"task {which['index']} of {taskset!r} is another than when it was drawn")
    return found


class TasksetSource:
    """Verifiers tasks as Rollover's; their data other than prompts become columns."""

    def __init__(self, tasks: Tasks, params: Mapping[str, Any], label: str, reward: str) -> None:
        self.tasks, self.params, self.label, self.reward = tasks, dict(params), label, reward
        self.same = problem_text
        self.endless, self.num_problems = tasks.num is None, tasks.num

    def problem(self, index: int) -> Task:
        data = self.tasks[index].data
        columns = data.model_dump(mode="json", exclude_defaults=True, exclude=_ELSEWHERE)
        columns[_COLUMN] = {"index": index, "hash": self.tasks[index].hash, "params": self.params}
        messages = _messages(data) or ({"role": "user", "content": data.name or f"task {index}"},)
        return Task(f"{self.label}/{index}", self.label, self.reward, messages=messages, columns=columns)

    def together(self, index: int) -> range:
        return all_together(index, self.num_problems)

    def fingerprint(self) -> str:
        return fingerprint_of(self)


def _messages(data: Any) -> tuple[dict[str, str], ...]:
    """Return the task's first messages; none if a simulated user begins."""
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if data.prompt is None:
        return ()
    if isinstance(data.prompt, str):
        return (*system, {"role": "user", "content": data.prompt})
    return (*system, *({"role": m.role, "content": _text(m.content)} for m in data.prompt))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if other := next((part for part in content or () if not hasattr(part, "text")), None):
        raise ValueError(
            f"a task of the taskset has a {type(other).__name__} in its prompt: agents are given text alone, and it"
            " would be left out. Choose a taskset of texts"
        )
    return "\n".join(part.text for part in content or ())
