"""`@distilled(...)`: a workflow's own [distill] options, which name the roles that a teacher trains.

Configuration files and flags override them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rollover.functions import described, load_function
from rollover.live_objects import LIVE
from rollover.processes import prepare_libraries

if TYPE_CHECKING:
    from rollover.config import Config

_ATTRIBUTE = "rollover_distill"
_Workflow = TypeVar("_Workflow", bound=Callable[..., Any])


def distilled(
    *,
    teacher: str,
    roles: str | Sequence[str] | None = None,
    privileged: str | Callable[..., Any] | None = None,
    coef: float | None = None,
    discount: float | None = None,
    clip: float | None = None,
    refresh_steps: int | None = None,
    mix: Literal["replace", "add"] | None = None,
) -> Callable[[_Workflow], _Workflow]:
    """Decorate the function or class of a workflow: a teacher trains `roles` (None: all), rewards train the others.

    The arguments are the options of [distill] (docs/distillation.md); the configuration overrides them. `privileged`
    may be a function of the same file. ValueError if decorated twice: a run has one teacher.
    """
    given = {
        "teacher": teacher, "roles": [roles] if isinstance(roles, str) else roles, "privileged": privileged,
        "coef": coef, "discount": discount, "clip": clip, "refresh_steps": refresh_steps, "mix": mix,
    }  # fmt: skip
    options = {f"distill.{name}": value for name, value in given.items() if value is not None}

    def decorate(workflow: _Workflow) -> _Workflow:
        if _ATTRIBUTE in vars(workflow):
            raise ValueError("@distilled twice: a run has one teacher. Name all roles in one, roles=[...]")
        setattr(workflow, _ATTRIBUTE, options)
        return workflow

    return decorate


def distill_options(config: Config) -> dict[str, Any]:
    """Return the [distill] options of a configuration's workflow by dotted keys; {} without any, or if it is not found.

    A file that does not mention `distilled` is not imported. `privileged` becomes a name that a configuration can hold,
    ValueError without one; for a live object (live_objects.py) it stays a function.
    """
    spec = config.workflow.function or config.workflow.environment
    if not spec or not _may_be_decorated(spec.rpartition(":")[0]):
        return {}
    prepare_libraries(config.run)  # the user's module may import torch
    try:
        workflow = load_function(spec, ".")
    except ValueError:
        return {}  # reported where the workflow is loaded
    options = dict(getattr(workflow, _ATTRIBUTE, {}))
    privileged, place = options.get("distill.privileged"), spec.rpartition(":")[0]
    if callable(privileged) and place != LIVE:
        options["distill.privileged"] = _name_in(place, privileged, spec)
    return options


def _may_be_decorated(place: str) -> bool:
    """Whether the file contains the word; True for a module."""
    try:
        return not place.endswith(".py") or "distilled" in Path(place).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _name_in(place: str, function: Callable[..., Any], spec: str) -> str:
    name = f"{place}:{getattr(function, '__qualname__', '')}"
    try:
        if load_function(name, ".") is function:
            return name
    except ValueError:
        pass
    raise ValueError(
        f"@distilled of {spec!r}: privileged is {described(function)}, which {place} does not have under that name."
        " Define it there, outside of other functions, or name it as path.py:function"
    )
