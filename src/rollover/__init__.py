"""Rollover: reinforcement learning of language models with resumable rollouts.

    run = rollover.train(model="smollm2-135m", tasks=rows, reward=f, num_steps=20)     docs/python.md

Names are loaded when they are first used: `import rollover` imports neither torch nor pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import rollover.logs  # noqa: F401  (it sets up the logger)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rollover.api.engine import Completion as Completion
    from rollover.api.engine import Engine as Engine
    from rollover.api.planning import plan as plan
    from rollover.api.run import Run as Run
    from rollover.api.run import open as open
    from rollover.api.session import Session as Session
    from rollover.api.training import sft as sft
    from rollover.api.training import train as train
    from rollover.api.training import train_async as train_async
    from rollover.envs.protocol import Observation as Observation
    from rollover.run.loop import Step as Step
    from rollover.run.producer import Played as Played
    from rollover.run.producer import ready_episodes as ready_episodes
    from rollover.run.producer import ready_group as ready_group
    from rollover.track.tracker import RunInfo as RunInfo
    from rollover.track.tracker import Tracker as Tracker
    from rollover.trajectories import Episode as Episode
    from rollover.trajectories import Trajectory as Trajectory
    from rollover.trajectories import TrajectoryGroup as TrajectoryGroup
    from rollover.types import Group as Group
    from rollover.types import Prompt as Prompt
    from rollover.types import Reward as Reward
    from rollover.types import Rollout as Rollout
    from rollover.types import Segment as Segment
    from rollover.types import Task as Task
    from rollover.workflows.distilled import distilled as distilled

# Where each public name is.
_PLACES = {
    "Completion": "rollover.api.engine",
    "Engine": "rollover.api.engine",
    "Episode": "rollover.trajectories",
    "Group": "rollover.types",
    "Observation": "rollover.envs.protocol",
    "Prompt": "rollover.types",
    "Reward": "rollover.types",
    "Rollout": "rollover.types",
    "Run": "rollover.api.run",
    "RunInfo": "rollover.track.tracker",
    "Segment": "rollover.types",
    "Session": "rollover.api.session",
    "Step": "rollover.run.loop",
    "Task": "rollover.types",
    "Tracker": "rollover.track.tracker",
    "Trajectory": "rollover.trajectories",
    "TrajectoryGroup": "rollover.trajectories",
    "distilled": "rollover.workflows.distilled",
    "open": "rollover.api.run",
    "plan": "rollover.api.planning",
    "Played": "rollover.run.producer",
    "ready_episodes": "rollover.run.producer",
    "ready_group": "rollover.run.producer",
    "sft": "rollover.api.training",
    "train": "rollover.api.training",
    "train_async": "rollover.api.training",
}
__all__ = sorted(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'rollover' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
