"""`@distilled(...)`: a workflow says by itself which of its roles a teacher trains: [distill] in its own file.

Its arguments are options of the configuration, below every file and flag that sets them.
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
    """Decorates the function or the class of a workflow: a teacher trains `roles` of it (None: all), and the other ones
    are trained by their rewards. The arguments are the options of [distill] (docs/distillation.md); a configuration
    that sets one of them has the last word. `privileged` may be a function of the same file.

    ValueError where it was decorated before: a run has one teacher.
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
    """What the workflow of a configuration says of [distill], by dotted keys; {} where it says nothing, or is not
    found. A file that does not name `distilled` is not imported.

    ValueError where its `privileged` has no name that a configuration can hold. Of an object that a program handed over
    (live_objects.py) it is the function itself.
    """
    spec = config.workflow.function or config.workflow.environment
    if not spec or not _may_be_decorated(spec.rpartition(":")[0]):
        return {}
    prepare_libraries(config.run)  # the user's module may import torch
    try:
        workflow = load_function(spec, ".")
    except ValueError:
        return {}  # whoever needs the workflow says why
    options = dict(getattr(workflow, _ATTRIBUTE, {}))
    privileged, place = options.get("distill.privileged"), spec.rpartition(":")[0]
    if callable(privileged) and place != LIVE:
        options["distill.privileged"] = _name_in(place, privileged, spec)
    return options


def _may_be_decorated(place: str) -> bool:
    """Whether the word stands in the file; of a module it is not known."""
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
