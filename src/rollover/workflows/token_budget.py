"""The tokens that the turns of one Episode may sample, over all its Rollouts (workflow.max_tokens).

A turn reserves as many as it may get, and gives back what it did not sample: so turns that are under way at the same
time cannot exceed the bound together.
"""

from __future__ import annotations

import asyncio


class TokenBudget:
    """Of `most` tokens; 0: as many as the Rollouts may have. `sampled`: those that are on record of an earlier run."""

    def __init__(self, most: int, sampled: int = 0) -> None:
        self.most = most
        self._left = most - sampled
        self._reserved: dict[str, int] = {}  # by the id of the Rollout whose turn is under way
        self._ended = asyncio.Event()  # the next turn has

    async def room(self, wanted: int) -> int:
        """How many of `wanted` tokens a turn may sample now; 0 or less: none is left. Waits while it might get more
        after the end of a turn that is under way. `begin` follows without a pause."""
        if not self.most:
            return wanted
        while self._reserved and self.free < wanted:
            await self._ended.wait()
        return min(wanted, self.free)

    def begin(self, rollout_id: str, num: int) -> None:
        """A turn of the Rollout is under way, which may sample `num` tokens."""
        if self.most:
            self._reserved[rollout_id] = num

    def end(self, rollout_id: str, num_sampled: int) -> None:
        """It has ended."""
        if self.most:
            del self._reserved[rollout_id]
            self._left -= num_sampled
            self._ended.set()
            self._ended = asyncio.Event()

    @property
    def free(self) -> int:
        """Neither sampled nor reserved."""
        return self._left - sum(self._reserved.values())
