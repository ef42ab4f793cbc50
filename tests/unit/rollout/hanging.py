"""Engines and runs that hang, for the tests of driver and watchdog. Their seconds are those of a virtual loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping

import pytest

import virtual_time
from fake_engine import FakeEngine
from rollover.config import WatchdogConfig
from rollover.engine.protocol import ExtendRequest
from rollover.rollout.watchdog import Watchdog
from rollover.types import Group
from unit.rollout.run import Run

LIMIT_S = 0.08
SCORING_S = 0.12
TOO_LONG_S = 5  # several limits: who waits so long waits for ever


def short(seed: int) -> int:
    return 4 + seed % 8


def watchdog(**changes: float) -> Watchdog:
    values = {"rollout_timeout_s": LIMIT_S, "grace_s": 0.04, "reward_timeout_s": SCORING_S}
    values |= {"max_failures": 2, "retry_s": 0.01}
    return Watchdog(WatchdogConfig.model_validate(values | changes))


def steps(run: Run, num: int, seconds: float = 10) -> list[list[Group]]:
    """So many steps, within so many virtual seconds; the ledger balances after each."""

    async def go() -> list[list[Group]]:
        async with asyncio.timeout(seconds):
            batches = [await run.step() for _ in range(num)]
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "tasks were left running"
        return batches  # type: ignore[return-value]

    return virtual_time.run(go())


async def let_go(run: Run, engine: Hanging, num: int = 1) -> list[list[Group]]:
    """So many steps; then what ignored its cancellation is ended, so that the event loop can close."""
    async with asyncio.timeout(5):
        batches = [await run.step() for _ in range(num)]
    for future in engine.let_go:
        future.cancel()
    await asyncio.sleep(0.01)
    return batches  # type: ignore[return-value]


def assert_waits_for_ever(run: Run) -> None:
    with pytest.raises(TimeoutError):
        steps(run, 1, TOO_LONG_S)


def assert_said(run: Run, *patterns: str) -> None:
    assert len(run.said) == len(patterns), run.said
    for line, pattern in zip(run.said, patterns, strict=True):
        assert re.fullmatch(pattern, line), line


def stats(run: Run) -> tuple[float, float, float]:
    """Stalled rollouts, stalled rewards, redispatched."""
    counts = run.driver.watchdog.stats()
    return tuple(counts[f"watchdog/{name}"] for name in ("stalled_rollouts", "stalled_rewards", "redispatched"))


class Hanging(FakeEngine):
    """Some rollouts get no token from their `after`-th on, in their first `times` extensions.

    `deaf`: they do not return when interrupted either; `stubborn`: nor when cancelled, until `let_go`. `pace_s`: time
    between two tokens.
    """

    def __init__(
        self,
        *hanging: str,
        after: int = 3,
        times: float = 1,
        deaf: bool = False,
        stubborn: bool = False,
        pace_s: float = 0,
        lengths: Mapping[str, int] | Callable[[int], int] = short,
    ) -> None:
        super().__init__(lengths)
        self.hanging, self.after, self.times, self.deaf, self.stubborn = hanging, after, times, deaf, stubborn
        self.pace_s = pace_s
        self.extensions: dict[str, list[ExtendRequest]] = {}
        self.cancelled: list[str] = []
        self.let_go: list[asyncio.Future] = []

    async def extend(self, request):
        self.extensions.setdefault(request.rollout_id, []).append(request)
        hangs = self._hangs(request.rollout_id)
        try:
            return await super().extend(request)
        except asyncio.CancelledError:
            self.cancelled.append(request.rollout_id)
            if self.stubborn and hangs:
                self.let_go.append(asyncio.get_running_loop().create_future())
                await self.let_go[-1]
            raise

    @property
    def is_stuck(self) -> bool:
        """Whether all that runs, if anything does, gets no token any more."""
        return bool(self._running) and all(map(self._is_stuck, self._running.values()))

    async def _run(self) -> None:
        while self._running:
            # Not a hot loop while all that is left hangs.
            await asyncio.sleep(0.002 if self.is_stuck else self.pace_s)
            self._step()

    def _hangs(self, rollout_id: str) -> bool:
        return rollout_id in self.hanging and len(self.extensions[rollout_id]) <= self.times

    def _is_stuck(self, sequence) -> bool:
        num_tokens = len(sequence.request.generated_ids) + len(sequence.tokens)
        return self._hangs(sequence.request.rollout_id) and num_tokens >= self.after

    def _decode(self, sequence):
        return None if self._is_stuck(sequence) else super()._decode(sequence)

    def interrupt(self, rollout_ids=None) -> None:
        wanted = list(self._running) if rollout_ids is None else list(rollout_ids)
        super().interrupt([i for i in wanted if not (self.deaf and i in self.extensions and self._hangs(i))])


ROLLOUT = r"watchdog: rollout {} \({}, begun \S+ s ago, {} tokens, none for \S+ s\): "
CONTINUED = "it is interrupted and continued from there"
CANCELLED = "it does not come back, so it is cancelled and continued from there"
CANCELLED_DROPPED = "it does not come back, so it is cancelled; its group is being dropped"
DROPPED = r"it stalls once too often, so its group is dropped \(stalled\)"
ABANDONED = r"its cancellation has no effect, so it is abandoned and its group is dropped \(stalled\)"


def said(rollout_id: str, state: str, num_tokens: int, what: str) -> str:
    return ROLLOUT.format(rollout_id, state, num_tokens) + what
