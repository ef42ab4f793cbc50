from __future__ import annotations

import asyncio
import dataclasses

import pytest

from fake_engine import FakeEngine
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.types import Prompt, SamplingParams, Segment, StopReason


def request(rollout_id: str = "0-0", seed: int = 5, budget: int = 50, **changes) -> ExtendRequest:
    made = ExtendRequest(rollout_id, Prompt((1, 2)), (), budget, seed, SamplingParams(), StopCriteria(frozenset({3})))
    return dataclasses.replace(made, **changes)


def tokens(segments: list[Segment]) -> list[int]:
    return [int(t) for s in segments for t in s.token_ids]


async def steps(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


def test_length_by_rollout_id_and_by_seed() -> None:
    async def run() -> None:
        by_id, by_seed = FakeEngine({"0-0": 4, "1-0": 9}), FakeEngine(lambda seed: seed)
        assert [len(tokens(await by_id.extend(request(i)))) for i in ("0-0", "1-0")] == [4, 9]
        assert [len(tokens(await by_seed.extend(request(seed=n)))) for n in (1, 7)] == [1, 7]

    asyncio.run(run())


def test_all_that_run_advance_together_without_wall_time() -> None:
    async def run() -> None:
        engine = FakeEngine(lambda seed: 5000)
        extends = [asyncio.ensure_future(engine.extend(request(f"{i}-0", seed=i, budget=9000))) for i in range(3)]
        await steps(20)
        sizes = {len(tokens(s)) for s in (await engine.progress([f"{i}-0" for i in range(3)])).values()}
        assert len(sizes) == 1 and sizes.pop() > 5
        engine.interrupt(["1-0"])
        await extends[1]
        assert not extends[0].done() and not extends[2].done()
        engine.interrupt()
        num_tokens = [len(tokens(segments)) for segments in await asyncio.gather(*extends)]
        assert engine.stats()["engine/decode_steps"] == num_tokens[0] == num_tokens[2] > num_tokens[1]

    asyncio.run(run())


def test_a_new_version_begins_a_segment_with_other_logprobs() -> None:
    async def run() -> None:
        engine = FakeEngine({"0-0": 30}, policy_version=4)
        (old,) = await engine.extend(request())
        extend = asyncio.ensure_future(engine.extend(request()))
        await steps(10)
        await engine.load_weights(5, ())
        segments = await extend
        assert [s.policy_version for s in segments] == [4, 5]
        assert [s.stop_reason for s in segments] == [StopReason.PAUSED, StopReason.EOS]
        assert tokens(segments) == tokens([old])
        assert segments[1].logprobs.tolist() != old.logprobs[len(segments[0]) :].tolist()

    asyncio.run(run())


def test_close_ends_what_runs() -> None:
    async def run() -> None:
        engine = FakeEngine({"0-0": 10**9})
        extend = asyncio.ensure_future(engine.extend(request(budget=10**9)))
        await steps(3)
        await engine.close()
        with pytest.raises(asyncio.CancelledError):
            await extend

    asyncio.run(run())
