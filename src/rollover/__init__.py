"""Rollover: reinforcement learning of language models with resumable rollouts.

    run = rollover.train(model="smollm2-135m", tasks=rows, reward=f, num_steps=20)     docs/python.md

Names are loaded when they are first used: `import rollover` imports neither torch nor pydantic.
"""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    import inspect

    from rollover.api.engine import Completion as Completion
    from rollover.api.engine import Engine as Engine
    from rollover.api.planning import plan as plan
    from rollover.api.run import Run as Run
    from rollover.api.run import open as open
    from rollover.api.session import Session as Session
    from rollover.api.training import train as train
    from rollover.api.training import train_async as train_async
    from rollover.train.loop import Step as Step
    from rollover.types import Group as Group
    from rollover.types import Reward as Reward
    from rollover.types import Rollout as Rollout
    from rollover.types import Segment as Segment
    from rollover.types import Task as Task

# Where each public name is. `train` is not among them: see the end of this file.
_PLACES = {
    "Completion": "rollover.api.engine",
    "Engine": "rollover.api.engine",
    "Group": "rollover.types",
    "Reward": "rollover.types",
    "Rollout": "rollover.types",
    "Run": "rollover.api.run",
    "Segment": "rollover.types",
    "Session": "rollover.api.session",
    "Step": "rollover.train.loop",
    "Task": "rollover.types",
    "open": "rollover.api.run",
    "plan": "rollover.api.planning",
    "train_async": "rollover.api.training",
}
__all__ = sorted([*_PLACES, "train"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'rollover' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CallableRoom(types.ModuleType):
    """The package rollover.train, which is called like the function of the same name.

    Importing any module of the package makes `rollover.train` the package, whatever it was before, so the package has
    to be the function, too.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def _function(self) -> Any:
        return importlib.import_module("rollover.api.training").train

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self._function.__doc__

    @property
    def __signature__(self) -> inspect.Signature:
        import inspect

        return inspect.signature(self._function)


importlib.import_module("rollover.train").__class__ = _CallableRoom
