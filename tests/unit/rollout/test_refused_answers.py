"""What an engine says that cannot be, of a rollout or asked about several: refused, said, and the run goes on."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import numpy as np
import pytest

import virtual_time
from fake_engine import FakeEngine
from heard import hear
from rollover.config import WatchdogConfig
from rollover.engine.protocol import EngineDied
from rollover.rollout.cache import RolloutCache
from rollover.rollout.requests import RetryingEngine
from rollover.types import DropReason, Prompt, SamplingParams, Segment, StopReason
from unit.rollout.hanging import Hanging, assert_said, short, steps, watchdog
from unit.rollout.run import Run, ids, uninterrupted_tokens
from unit.rollout.world import make_segment, make_task


def segment(num: int, start: int | None, version: int = 0, stop: StopReason = StopReason.PAUSED) -> Segment:
    return dataclasses.replace(make_segment(num, version, stop), start=start)


def test_the_cache_holds_no_token_twice() -> None:
    cache = RolloutCache(10)
    cache.admit(make_task(0), Prompt.of([1]), 1)
    cache.start("0-0")
    cache.append("0-0", [segment(3, 0)])
    with pytest.raises(AssertionError, match="tokens come twice"):
        cache.append("0-0", [segment(3, 0)])


class Repeats(Hanging):
    """Returns what an earlier extension of the rollout returned, `times` times."""

    def __init__(self, rollout_id: str, times: int) -> None:
        super().__init__(rollout_id)
        self.of, self.left, self.first = rollout_id, times, []

    async def extend(self, request):
        segments = await super().extend(request)
        if request.rollout_id != self.of or not request.generated_ids:
            self.first = segments if request.rollout_id == self.of else self.first
            return segments
        if self.left:
            self.left -= 1
            return self.first
        return segments


def test_answer_of_an_earlier_extend_is_refused() -> None:
    run = Run(engine=Repeats("0-1", times=1), watchdog=watchdog())
    (batch,) = steps(run, 1)
    assert ids([batch]) == [[0, 1]]
    rollout = batch[0].rollouts[1]
    assert rollout.token_ids() == uninterrupted_tokens(rollout, 40, short)
    refused = "its answer is refused, as it begins with token 0, and token 3 comes next"
    failed = rf"the engine failed at rollout 0-1 \({refused}\): retry in 0.01 s"
    assert_said(run, r"watchdog: rollout 0-1 \(running, .*", failed)
    assert run.driver.retrying_engine.stats()["watchdog/refused_answers"] == 1


def test_repeatedly_refused_answers_drop_the_group() -> None:
    run = Run(engine=Repeats("0-1", times=99), watchdog=watchdog())
    assert ids(steps(run, 1)) == [[1, 2]]
    assert run.ledger.dropped[DropReason.FAILED].groups == 1
    assert run.said[-1].endswith("token 3 comes next): its group is dropped (failed)")
    assert run.driver.retrying_engine.stats()["watchdog/refused_answers"] == 2


def test_progress_of_an_earlier_extend_is_ignored() -> None:
    """Deaf while it hangs, and `progress` shows the tokens of the rollout's first extension."""

    class Stale(Hanging):
        async def progress(self, rollout_ids):
            rollout_ids = list(rollout_ids)
            known = await super().progress(rollout_ids)
            if "0-1" in known and len(self.extensions["0-1"]) == 2:
                self.seen = True
                return known | {"0-1": [segment(3, 0)], "9-9": [segment(3, 0)]}
            return known

    engine = Stale("0-1", times=2, deaf=True)
    run = Run(engine=engine, watchdog=watchdog(max_stalls=5))
    (batch,) = steps(run, 1)
    rollout = batch[0].rollouts[1]
    assert engine.seen and rollout.token_ids() == uninterrupted_tokens(rollout, 40, short)
    run.check()


def test_nan_logprobs_fail_the_answer_not_the_run() -> None:
    class Breaks(Hanging):
        async def extend(self, request):
            segments = await super().extend(request)
            if request.rollout_id == "0-1" and len(self.extensions["0-1"]) == 1:
                segments = [dataclasses.replace(s, logprobs=s.logprobs * np.float32("nan")) for s in segments]
            return segments

    run = Run(engine=Breaks("none"), watchdog=watchdog())
    (batch,) = steps(run, 1)
    assert ids([batch]) == [[0, 1]] and not any(r.why_not_sampled() for g in batch for r in g.rollouts)
    assert_said(
        run, r"the engine failed at rollout 0-1 \(its answer is refused, as its token 0 has the log-prob nan, .*"
    )
    assert run.driver.retrying_engine.stats()["watchdog/refused_answers"] == 1
    run.check()


def test_a_checkpoint_with_what_is_no_log_prob_is_refused() -> None:
    cache = RolloutCache(10)
    cache.admit(make_task(0), Prompt.of([1]), 1)
    cache.start("0-0")
    cache.append("0-0", [segment(3, 0)])
    meta, arrays = cache.state_dict()
    RolloutCache(10).load_state_dict(meta, arrays)
    arrays["logprobs"] = arrays["logprobs"] * np.float32("nan")
    with pytest.raises(ValueError, match="the checkpoint's rollout 0-0 cannot be trained, as its token 0 has .* nan"):
        RolloutCache(10).load_state_dict(meta, arrays)


def test_an_answer_beyond_the_budget_does_not_end_the_run() -> None:
    class Overruns(Hanging):
        async def extend(self, request):
            if request.rollout_id == "0-0" and len(self.extensions.get("0-0", ())) == 0:
                await super().extend(request)
                return [segment(41, 0, stop=StopReason.LENGTH)]
            return await super().extend(request)

    run = Run(engine=Overruns("none"), watchdog=watchdog())
    assert ids(steps(run, 1)) == [[0, 1]]
    assert_said(
        run, r"the engine failed at rollout 0-0 \(.* it has 41 tokens, and the rollout may get 40\): retry in .*"
    )


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
