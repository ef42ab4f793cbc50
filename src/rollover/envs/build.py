"""The environments by name, and the one that a run's rollouts meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollover.config import Config
from rollover.envs.protocol import Environment
from rollover.envs.single_turn import Scorer, SingleTurn
from rollover.functions import own_function
from rollover.types import Task

_CONTRACT = sorted(name for name in vars(Environment) if not name.startswith("_"))


@dataclass(frozen=True)
class EnvironmentSetup:
    """What an environment is made from."""

    config: Config
    tokenizer: Any
    """Of the model that is trained."""
    score: Scorer
    """Asks the reward function of the rollouts' task, with the text of all their tokens: see Environment.score."""
    scores_singly: Callable[[Task], bool]
    """See Environment.scores_singly."""


ENVIRONMENTS: dict[str, Callable[[EnvironmentSetup], Environment]] = {
    "single_turn": lambda setup: SingleTurn(setup.score, setup.scores_singly),
}


def build_environment(setup: EnvironmentSetup) -> Environment:
    """The environment that rollout.environment names. ValueError if a function of one's own gives none."""
    name = setup.config.rollout.environment
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name](setup)
    make = own_function("rollout.environment", name, f"an environment with {', '.join(_CONTRACT)} (envs/protocol.py)")
    environment = make(setup)
    if missing := [part for part in _CONTRACT if not hasattr(environment, part)]:
        raise make.refused(f"a {type(environment).__name__} without {', '.join(missing)}")
    return environment
