from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys

import pytest

from rollover.engine.fake import FakeEngine
from rollover.engine.protocol import ExtendRequest
from rollover.types import Prompt, SamplingParams, Segment, StopReason


def request(rollout_id: str = "0-0", seed: int = 5, budget: int = 50, **changes) -> ExtendRequest:
    made = ExtendRequest(rollout_id, Prompt((1, 2)), (), budget, seed, SamplingParams(), frozenset({3}))
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


def test_ends_with_eos_or_length() -> None:
    async def run() -> None:
        engine = FakeEngine({"0-0": 6})
        (eos,) = await engine.extend(request(budget=6))
        assert eos.stop_reason is StopReason.EOS and eos.token_ids[-1] == 3 and 3 not in eos.token_ids[:-1]
        (length,) = await engine.extend(request(budget=5))
        assert length.stop_reason is StopReason.LENGTH and len(length) == 5
        assert tokens([length]) == tokens([eos])[:5]

    asyncio.run(run())


def test_the_length_counts_earlier_extensions() -> None:
    async def run() -> None:
        engine = FakeEngine({"0-0": 6})
        (whole,) = await engine.extend(request())
        (rest,) = await engine.extend(request(generated_ids=tuple(tokens([whole])[:4]), budget=46))
        assert tokens([rest]) == tokens([whole])[4:]

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


def test_a_cancelled_extension_leaves_the_engine() -> None:
    async def run() -> None:
        engine = FakeEngine({"0-0": 10})
        extend = asyncio.ensure_future(engine.extend(request()))
        await steps(3)
        extend.cancel()
        with pytest.raises(asyncio.CancelledError):
            await extend
        assert await engine.progress(["0-0"]) == {}
        assert len(tokens(await engine.extend(request()))) == 10

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


def test_works_in_one_event_loop_after_another() -> None:
    engine = FakeEngine({"0-0": 4})
    assert tokens(asyncio.run(engine.extend(request()))) == tokens(asyncio.run(engine.extend(request())))


def test_imports_no_torch() -> None:
    code = "import sys, rollover.engine.fake, rollover.rollout.driver; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_repetition_is_looked_for_in_the_present_turn_alone() -> None:
    async def run() -> None:
        for text_start, reason in ((0, StopReason.REPETITION), (40, StopReason.LENGTH)):
            engine = FakeEngine(lambda seed: 1000, vocab_size=1)
            asked = request(budget=10, generated_ids=(0,) * 40, stop_repetition_tokens=16, text_start=text_start)
            assert (await engine.extend(asked))[-1].stop_reason is reason

    asyncio.run(run())
