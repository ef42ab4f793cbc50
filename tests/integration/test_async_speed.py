"""experiments/async_speed.py runs: an engine elsewhere, in a process that computes nothing. Speeds are not tested."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

import async_speed
import virtual_time
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.types import Prompt, SamplingParams, Segment, StopReason


@pytest.mark.slow
def test_both_modes_are_compared_at_equal_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_speed, "MODEL", {})  # the smallest one: what its figures are is not tested
    out = async_speed.compare("remote_engine", steps=2, repeats=1, say=lambda _: None)
    (result,) = out["runs"]
    assert result["engine"] == "elsewhere" and result["ratio"] > 0
    assert result["synchronous"]["staleness"] == 0 < result["asynchronous"]["staleness"] <= 3
    assert result["synchronous"]["mean_tokens"] == pytest.approx(result["asynchronous"]["mean_tokens"], rel=0.2)
    assert result["synchronous"]["generate_s"] >= 0.9 * out["token_s"] * 80  # the longest of 64 answers


def test_new_weights_cut_an_answer_and_an_interrupted_one_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(async_speed, "time", clock)

    class Quick(async_speed.Sleeping):
        token_s = 5e-3

    def request(so_far: list[int]) -> ExtendRequest:
        return ExtendRequest(
            "0-0", Prompt((1,)), tuple(so_far), 96 - len(so_far), 7, SamplingParams(), StopCriteria(frozenset({100}))
        )

    async def answers() -> tuple[list[Segment], list[Segment]]:
        engine = Quick()
        extension = asyncio.ensure_future(engine.extend(request([])))
        await asyncio.sleep(0.032)
        await engine.load_weights(1, ())
        whole = await extension
        extension = asyncio.ensure_future(engine.extend(request([])))
        await asyncio.sleep(0.032)
        engine.interrupt()
        parts = await extension
        return whole, parts + await engine.extend(request(parts[0].token_ids.tolist()))

    whole, parts = virtual_time.run(answers())
    assert [(s.policy_version, s.stop_reason) for s in whole] == [(0, StopReason.PAUSED), (1, StopReason.EOS)]
    assert [(s.policy_version, s.stop_reason) for s in parts] == [(1, StopReason.PAUSED), (1, StopReason.EOS)]
    tokens = [np.concatenate([s.token_ids for s in segments]).tolist() for segments in (whole, parts)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 12
    assert [len(segments[0]) for segments in (whole, parts)] == [6, 6]
