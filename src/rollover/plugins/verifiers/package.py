"""Loads environments and tasksets of the package verifiers (0.4), with errors that name the configuration key.

The first call imports verifiers, which may take 15 seconds.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rollover.functions import explained

KEY, ARGS = "workflow.verifiers", "workflow.verifiers_args"
HARNESS = "rollover-chat"
"""The id of our harness, in addition to those of verifiers."""
_NO_HARNESS = "bash"  # verifiers' default for a taskset without a harness


def import_verifiers() -> Any:
    """Import verifiers.v1 and register our harness. ValueError if it is not installed."""
    try:
        vf = importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        if error.name not in ("verifiers", "verifiers.v1"):
            raise ValueError(f"{KEY}: verifiers cannot be imported: {error}") from error
        raise ValueError(f"{KEY} needs the package verifiers, 0.4: pip install 'rollover[verifiers]'") from error
    if not hasattr(vf, "resolve_env_config"):
        raise ValueError(f"{KEY} needs verifiers 0.4, and another version is installed: pip install 'verifiers==0.4.*'")
    # verifiers finds a harness as a top-level module of this name.
    sys.modules.setdefault(HARNESS.replace("-", "_"), importlib.import_module("rollover.plugins.verifiers.harness"))
    return vf


def load_environment(taskset: str, args: Mapping[str, Any]) -> Any:
    """Load the verifiers Env of a taskset; `args` as the table [env] of verifiers' own configurations.

    Seats without harness and runtime use our harness (unless the taskset has one) on this machine. ValueError if the
    taskset does not exist or the arguments are invalid.
    """
    vf = import_verifiers()
    try:
        block = _block(vf, taskset, args)
        env = vf.load_environment(vf.resolve_env_config(block))
        _check_pairing(vf, env)
    except (Exception, SystemExit) as error:  # boundary: the user's taskset
        raise _refused(taskset, error) from error
    return env


def load_tasks(taskset: str, settings: Mapping[str, Any]) -> Tasks:
    """Load the tasks of a taskset with its settings. ValueError if it cannot be loaded or is empty."""
    return _load_tasks(taskset, json.dumps(settings, sort_keys=True))


@functools.cache
def _load_tasks(taskset: str, settings: str) -> Tasks:
    vf = import_verifiers()
    try:
        tasks = Tasks(vf.load_taskset(vf.taskset_config_type(taskset).model_validate(
            {**json.loads(settings), "id": taskset}
        )))  # fmt: skip
        tasks.has(0)
    except (Exception, SystemExit) as error:  # boundary: the user's taskset
        raise _refused(taskset, error) from error
    if not tasks.has(0):
        raise ValueError(f"{KEY} = {taskset!r}: the taskset has no task")
    return tasks


class Tasks:
    """The tasks of a verifiers Taskset by number, read on demand. `num`: None if infinite."""

    def __init__(self, taskset: Any) -> None:
        self._left = iter(taskset)
        self._read: list[Any] = list(self._left) if taskset.bounded else []
        self.num: int | None = len(self._read) if taskset.bounded else None

    def has(self, index: int) -> bool:
        """Return whether the taskset has a task of this number."""
        while len(self._read) <= index:
            task = next(self._left, None)
            if task is None:
                return False
            self._read.append(task)
        return True

    def __getitem__(self, index: int) -> Any:
        if not self.has(index):
            raise IndexError(index)
        return self._read[index]


def seats(vf: Any, config: Any) -> dict[str, Any]:
    """Return the AgentConfigs of an environment's configuration by seat name."""
    return {name: value for name, value in config if isinstance(value, vf.AgentConfig)}


# Private


def _block(vf: Any, taskset: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table [env] with our defaults."""
    block = copy.deepcopy(dict(args))
    block["taskset"] = {**block.get("taskset", {}), "id": taskset}
    fields = vf.env_config_type(taskset, block.get("id", "")).model_fields
    brings_one = vf.default_harness_id(taskset) != _NO_HARNESS
    for name, field in fields.items():
        if not isinstance(declared := field.default, vf.AgentConfig):
            continue
        seat = dict(block.get(name, {}))
        if "runtime" not in declared.model_fields_set:
            seat.setdefault("runtime", {"type": "subprocess"})  # verifiers' default is a service on the network
        if declared.harness is None and not brings_one:
            seat.setdefault("harness", {"id": HARNESS})
        block[name] = seat
    return block


def _check_pairing(vf: Any, env: Any) -> None:
    """Raise verifiers' errors that would fail every episode."""
    validate_pairing = importlib.import_module("verifiers.v1.utils.compile").validate_pairing
    config, only_one = env.config, len(seats(vf, env.config)) == 1
    task = type(env.taskset).task_type() if only_one else vf.Task
    tools = [*task.toolsets(config.taskset.task), *type(env.taskset).toolsets(config.taskset)] if only_one else []
    for name, harness in config.agent_harnesses().items():
        validate_pairing(vf.load_harness(harness), task, getattr(config, name).runtime, tools=tools)


def _refused(taskset: str, error: BaseException) -> ValueError:
    if isinstance(error, ValidationError):  # the arguments
        lines = [f"{ARGS}.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        return ValueError(f"{KEY} = {taskset!r}: " + "; ".join(lines))
    return ValueError(f"{KEY} = {taskset!r} cannot be loaded: {explained(error)}")
