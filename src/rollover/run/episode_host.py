"""The host of episodes that are not trained: their agents, calls and gateway are those of a run's, their rollouts are
played as the calls come.

    play ──▶ episodes.begin ──▶ the agent ──open──▶ its rollouts are played ──▶ ended ──▶ all of them
                   ▲                └──────────restart: they are given up──┐
                   └────────────────────────────────────────────────────────┘

Owns the rollouts of each episode that is played, and who plays them. Never scores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from rollover.trajectories import place
from rollover.types import Reward, Rollout, RolloutState, StopReason
from rollover.workflows.episodes import Episodes

PlayRollout = Callable[[Rollout], Awaitable[None]]


class EpisodeHost:
    """Of `episodes`, which have no other. `play_rollout` plays one to its end: then it is SCORING, with a reward where
    its episode has failed. `forget` is told the ids of those that are given up."""

    def __init__(self, episodes: Episodes, play_rollout: PlayRollout, forget: Callable[[Iterable[str]], None]) -> None:
        self.episodes, self._play_rollout, self._forget = episodes, play_rollout, forget
        episodes.host = self
        self._runs: dict[tuple[int, int], _Run] = {}

    async def play(self, first: Rollout) -> list[Rollout]:
        """The rollouts of the Episode of `first`, which has no token, in their order when it has ended: it is begun
        again as often as it asks for that. Raises what playing one of them raises."""
        key = first.group_id, first.sibling
        while True:
            run = self._runs[key] = _Run(self._play_rollout)
            self.episodes.begin(first)
            try:
                restarts = await run.over
                if not restarts:
                    if run.failed is not None:
                        self.episodes.give_up(key)
                    return await run.at_end(first)
            finally:
                del self._runs[key]
                await run.cancel()
            self._forget([rollout.rollout_id for rollout in run.rollouts])

    # Host

    def open(self, rollout: Rollout) -> None:
        if (run := self._runs.get((rollout.group_id, rollout.sibling))) is not None:
            run.begin(rollout)

    def restart(self, group_id: int, sibling: int) -> None:
        self._end(group_id, sibling, restarts=True)

    def ended(self, group_id: int, sibling: int) -> None:
        self._end(group_id, sibling, restarts=False)

    # Private

    def _end(self, group_id: int, sibling: int, *, restarts: bool) -> None:
        if (run := self._runs.get((group_id, sibling))) is not None:
            run.end(restarts=restarts)


class _Run:
    """One run of an agent. `over`: it has ended, and whether it is to begin again."""

    def __init__(self, play_rollout: PlayRollout) -> None:
        self.rollouts: list[Rollout] = []
        self.over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._play_rollout = play_rollout
        self._playing: list[asyncio.Future[None]] = []
        self._error: Exception | None = None

    def begin(self, rollout: Rollout) -> None:
        self.rollouts.append(rollout)
        self._playing.append(asyncio.ensure_future(self._play(rollout)))

    def end(self, *, restarts: bool) -> None:
        if not self.over.done():
            self.over.set_result(restarts)

    @property
    def failed(self) -> Reward | None:
        """The reward of a rollout at which the environment failed: nobody tells the agent any more."""
        return next((rollout.reward for rollout in self.rollouts if rollout.reward is not None), None)

    async def at_end(self, first: Rollout) -> list[Rollout]:
        """Its rollouts, when the turns under way have ended; `first` alone where it made no call."""
        failed = self.failed
        if failed is None and self._error is None and self._playing:
            await asyncio.wait(self._playing)
        if self._error is not None:
            raise self._error
        if failed is not None:  # all that it did is worth nothing
            for rollout in self.rollouts:
                rollout.reward, rollout.stop_reason = failed, StopReason.ERROR
        if not self.rollouts:
            first.state, first.stop_reason = RolloutState.SCORING, StopReason.ENV_DONE
        return sorted(self.rollouts, key=place) or [first]

    async def cancel(self) -> None:
        """Nobody waits for its rollouts any more."""
        for playing in self._playing:
            playing.cancel()
        if self._playing:
            await asyncio.wait(self._playing)

    # Private

    async def _play(self, rollout: Rollout) -> None:
        try:
            await self._play_rollout(rollout)
        except Exception as error:  # whoever waits for the episode raises it
            self._error = self._error or error
            self.end(restarts=False)
        if rollout.reward is not None:
            self.end(restarts=False)
