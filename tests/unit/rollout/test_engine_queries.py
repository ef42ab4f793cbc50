"""How far an engine is: what it says wrong, late or not at all ends no run, and is said once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import numpy as np
import pytest

import virtual_time
from fake_engine import FakeEngine
from heard import hear
from rollover.config import WatchdogConfig
from rollover.engine.protocol import EngineDied
from rollover.rollout.requests import RetryingEngine
from rollover.types import SamplingParams, Segment, StopReason

SEGMENT = Segment(np.arange(3, dtype=np.int32), np.full(3, -1.0, np.float32), 0, SamplingParams(), StopReason.PAUSED)


class Answers(FakeEngine):
    """`answer` is awaited for every question."""

    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        super().__init__({})
        self.answer = answer

    async def progress(self, rollout_ids: Iterable[str]) -> Any:
        return await self.answer()

    async def queued(self, rollout_ids: Iterable[str]) -> Any:
        return await self.answer()


async def fail() -> Any:
    raise RuntimeError("out of order")


async def hang() -> Any:
    await asyncio.sleep(10**9)


async def say_nonsense() -> Any:
    return 7


async def say_half() -> Any:
    return {"0-0": [SEGMENT], "0-1": None, "0-2": ["tokens"], "9-9": [SEGMENT]}


def ask(engine: FakeEngine, times: int = 3, rollout_timeout_s: float = 30) -> tuple[list[Any], list[str]]:
    """(what was answered in turn to `progress` and `queued`, what was said)."""
    said: list[str] = hear([])
    asker = RetryingEngine(engine, WatchdogConfig(rollout_timeout_s=rollout_timeout_s))

    async def go() -> list[Any]:
        ids = ["0-0", "0-1", "0-2"]
        return [x for _ in range(times) for x in (await asker.progress(ids), await asker.queued(ids))]

    return virtual_time.run(go()), said


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (fail, "RuntimeError: out of order"),
        (hang, "no answer within 60 s"),
        (say_nonsense, "it says 7"),
    ],
)
def test_what_is_not_answered_is_said_once(answer: Callable[[], Awaitable[Any]], why: str) -> None:
    answers, said = ask(Answers(answer))
    assert answers == [{}, set()] * 3
    assert len(said) == 2 and all(why in line for line in said)
    assert "the engine fails at progress" in said[0] and "the engine fails at queued" in said[1]


def test_hanging_engine_is_logged_with_the_watchdog_off() -> None:
    answers, said = ask(Answers(hang), rollout_timeout_s=0)
    assert answers == [{}, set()] * 3
    assert len(said) == 2 and all("no answer within 600 s" in line for line in said)


def test_it_is_said_again_after_an_answer() -> None:
    answers = iter([fail, fail, say_half, fail])

    class OfProgress(FakeEngine):
        async def progress(self, rollout_ids: Iterable[str]) -> Any:
            return await next(answers)()

    _, said = ask(OfProgress({}), times=4)
    assert len(said) == 2


def test_what_makes_no_sense_is_left_out() -> None:
    class OfProgress(FakeEngine):
        async def progress(self, rollout_ids: Iterable[str]) -> Any:
            return await say_half()

    (progress, queued), said = ask(OfProgress({}), times=1)
    assert progress == {"0-0": [SEGMENT]} and queued == set() and not said


def test_the_end_of_an_engine_is_not_kept_quiet() -> None:
    async def die() -> Any:
        raise EngineDied("four times in a row")

    with pytest.raises(EngineDied):
        ask(Answers(die))
