"""Interfaces of scoring. A failure is missing data, never 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from rollover.rewards.registry import TrainerState
from rollover.types import Reward, Task


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A finished rollout to score: its task, completion text and ids.

    `num_turns`: verl's count, of the prompt, the turns of the policy and those of the environment.
    """

    task: Task
    completion: str
    completion_ids: tuple[int, ...] = ()
    num_turns: int = 2
    trainer_state: TrainerState = field(default_factory=TrainerState)


class Rewarder(Protocol):
    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        """Return one Reward per request (usually of one group), in order. Never raises for a failing function."""
        ...

    async def close(self) -> None: ...


class ScoringPool(Rewarder, Protocol):
    """The reward workers of a run: a RewardPool, or pools on several nodes."""

    @property
    def is_stalled(self) -> bool:
        """Whether no worker is available, so that waiting does not count as time of a scoring."""
        ...

    async def probe(self, task: Task) -> None:
        """Call the task's reward on dummy completions. RewardProbeError if it fails."""
        ...

    def scores_singly(self, task: Task) -> bool:
        """Return whether each rollout of the task is scored when it stops; else a group is scored together."""
        ...

    def stats(self) -> dict[str, float]:
        """Return cumulative counters and gauges under rewards/."""
        ...
