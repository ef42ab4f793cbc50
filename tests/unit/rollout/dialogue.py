"""An environment of several turns, and the engine under it: what the tests of environments share."""

from __future__ import annotations

import asyncio

from fake_engine import FakeEngine
from rollover.engine.protocol import ExtendRequest
from rollover.envs.protocol import RunEnvironment, written
from rollover.types import Reward, Rollout, Segment, Task

SAID = 900  # the environment's tokens: SAID + the turn, three times


class Dialogue(RunEnvironment):
    """Answers the first `turns - 1` turns of the policy. `pause`: turns of the event loop that an answer takes."""

    def __init__(self, turns: int = 3, pause: int = 0, ends_itself: bool = False) -> None:
        self.turns, self.pause, self.ends_itself = turns, pause, ends_itself
        self.asked: list[tuple[str, int]] = []

    async def next(self, rollout: Rollout) -> Segment | None:
        self.asked.append((rollout.rollout_id, rollout.num_tokens))
        for _ in range(self.pause):
            await asyncio.sleep(0)
        turn = 1 + sum(not s.trainable for s in rollout.segments)
        if turn < self.turns:
            return written(rollout, [SAID + turn] * 3)
        return written(rollout, [], done=True) if self.ends_itself else None

    async def score(self, rollouts: list[Rollout]) -> list[Reward]:
        return [Reward(float(sum(r.token_ids()))) for r in rollouts]

    def scores_singly(self, task: Task) -> bool:
        return False


class TurnEngine(FakeEngine):
    """Its rollouts end every turn with EOS after 3 to 9 tokens."""

    def __init__(self, vocab_size: int = 1000) -> None:
        self.ends: dict[str, int] = {}
        super().__init__(self.ends, vocab_size=vocab_size)

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        self.ends[request.rollout_id] = request.text_start + 3 + (request.seed + request.text_start) % 7
        return await super().extend(request)


def said(rollout: Rollout) -> list[list[int]]:
    """What the environment wrote, turn by turn."""
    return [s.token_ids.tolist() for s in rollout.segments if not s.trainable]
