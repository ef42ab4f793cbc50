"""The turns of simulated episodes: how their tokens are divided, and what their environments write. Pure."""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

from rollover.config import PlanConfig
from rollover.envs.protocol import written
from rollover.types import Rollout, Segment

T = TypeVar("T")


class Turns:
    """Of one simulation: every episode is one rollout of plan.turns turns, shorter ones of a token each. After each
    turn but the last its environment works for plan.tool_s and writes plan.tool_tokens."""

    def __init__(self, plan: PlanConfig) -> None:
        self.num, self._seconds = plan.turns, plan.tool_s
        self._written = (0,) * plan.tool_tokens

    def divided(self, lengths: list[int]) -> tuple[list[int], list[list[int]]]:
        """Where the first turns of episodes that sample so many tokens end, and where those after them do: in tokens
        after their prompts, those that environments write included."""
        if self.num == 1:
            return lengths, []
        ends = [self._ends(length) for length in lengths]
        return [of[0] for of in ends], [of[1:] for of in ends]

    def seconds(self, later: list[int]) -> float:
        """How long the environment works after a turn. `later`: where the turns after it end."""
        return self._seconds if later else 0.0

    def answer(self, rollout: Rollout, later: list[int]) -> Segment | None:
        """What it writes then; None: the episode is done."""
        return written(rollout, self._written) if later else None

    @property
    def num_written(self) -> int:
        """Tokens of an answer."""
        return len(self._written)

    def _ends(self, length: int) -> list[int]:
        num = min(self.num, length)
        share, longer = divmod(length, num)
        ends, at = [], 0
        for i in range(num):
            at += share + (i < longer)
            ends.append(at)
            at += len(self._written)
        return ends


class Later(Generic[T]):
    """What comes at a time of its own."""

    def __init__(self) -> None:
        self._items: list[tuple[float, int, T]] = []
        self._num = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def first(self) -> float:
        """When the next one comes; infinite if none does."""
        return self._items[0][0] if self._items else math.inf

    def add(self, time: float, item: T) -> None:
        heapq.heappush(self._items, (time, self._num, item))
        self._num += 1

    def due(self, now: float) -> list[T]:
        """Those that have come by now, which are taken away."""
        items = []
        while self._items and self._items[0][0] <= now:
            items.append(heapq.heappop(self._items)[2])
        return items


def is_partial(rollout: Rollout) -> bool:
    """Whether a turn of it has two or more segments: it rolled over."""
    return len(rollout.segments) > 1 and sum(1 if s.trainable else -1 for s in rollout.segments) > 1
