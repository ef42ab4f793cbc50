"""What scoring must do. A failure is missing data, never a silent 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollover.types import Reward, Task


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One finished rollout to score: its task, the completion text and ids."""

    task: Task
    completion: str
    completion_ids: tuple[int, ...] = ()


class Rewarder(Protocol):
    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        """Score these (usually one group); one Reward per request, in order. Never raises for a failing function."""
        ...

    async def close(self) -> None: ...
