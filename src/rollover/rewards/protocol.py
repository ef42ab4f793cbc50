"""What scoring must do. A failure is missing data, never a silent 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from rollover.rewards.registry import TrainerState
from rollover.types import Reward, Task


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One finished rollout to score: its task, the completion text and ids.

    `num_turns`: as verl counts them, the prompt, the turns of the policy and those of the environment.
    """

    task: Task
    completion: str
    completion_ids: tuple[int, ...] = ()
    num_turns: int = 2
    trainer_state: TrainerState = field(default_factory=TrainerState)


class Rewarder(Protocol):
    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        """Score these (usually one group); one Reward per request, in order. Never raises for a failing function."""
        ...

    async def close(self) -> None: ...


class ScoringPool(Rewarder, Protocol):
    """What a run uses of the workers that score: a RewardPool, or several of them."""

    @property
    def stands_still(self) -> bool:
        """Whether scorings wait since nothing is there that could do any: their time does not run."""
        ...

    async def probe(self, task: Task) -> None:
        """Call the task's reward on dummy completions. Raises RewardProbeError."""
        ...

    def scores_singly(self, task: Task) -> bool:
        """Whether the task's rollouts are scored one by one, each when it stops."""
        ...

    def stats(self) -> dict[str, float]:
        """Cumulative counters, and gauges, under rewards/."""
        ...
