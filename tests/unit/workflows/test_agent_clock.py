"""An agent's own time: not that in which it waits for the model, nor that in which the event loop stood still."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from rollover.workflows.episodes import AgentClock
from virtual_time import VirtualLoop, run


@pytest.mark.parametrize("limit_s", [0.4, 10.0, 300.0])
def test_the_limit_is_that_of_the_agents_own_seconds(limit_s: float) -> None:
    async def body() -> float:
        loop, timed_out = asyncio.get_running_loop(), asyncio.Event()
        clock = AgentClock(limit_s, timed_out.set)
        for _ in range(3):
            await asyncio.sleep(limit_s / 4)
            with clock.waiting():
                await asyncio.sleep(10 * limit_s)
        began = loop.time()
        assert not timed_out.is_set()
        await timed_out.wait()
        return loop.time() - began

    assert run(body()) == pytest.approx(limit_s / 4)


def test_agent_clock_skips_blocked_event_loop() -> None:
    """As a trainer in its thread, or another agent, lets it: what came for the agent meanwhile is still to be read."""

    async def body() -> float:
        loop, timed_out = asyncio.get_running_loop(), asyncio.Event()
        assert isinstance(loop, VirtualLoop)
        clock = AgentClock(60.0, timed_out.set)
        for _ in range(3):
            loop.let_pass(200.0)
            await asyncio.sleep(5.0)
        assert not timed_out.is_set()
        began = loop.time()
        await timed_out.wait()
        clock.end()
        return loop.time() - began

    assert 30.0 < run(body()) <= 45.0


def test_agent_that_blocks_the_event_loop_times_out() -> None:
    async def body() -> int:
        loop, timed_out = asyncio.get_running_loop(), asyncio.Event()
        assert isinstance(loop, VirtualLoop)
        AgentClock(60.0, timed_out.set)
        for num in itertools.count():
            if timed_out.is_set():
                return num
            loop.let_pass(200.0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        raise AssertionError

    assert run(body()) <= 60


def test_after_its_end_nothing_is_said() -> None:
    async def body() -> None:
        timed_out = asyncio.Event()
        clock = AgentClock(5.0, timed_out.set)
        await asyncio.sleep(1)
        clock.end()
        with clock.waiting():
            await asyncio.sleep(10)
        await asyncio.sleep(10)
        assert not timed_out.is_set()
        unlimited = AgentClock(0.0, timed_out.set)
        await asyncio.sleep(10**6)
        unlimited.end()
        assert not timed_out.is_set()

    run(body())
