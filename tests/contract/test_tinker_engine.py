"""The engine over a Tinker-compatible service, against a service on this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_tinker_backend import config, outline, service

import tiny
from contract import engine_contract
from contract.engine_contract import tokens_of
from rollover.engine.build import EngineSetup, build_engine
from rollover.engine.protocol import Engine, EngineDied, ExtendRequest, InvalidAnswer
from rollover.types import Media, Prompt, SamplingParams, StopReason
from tinker_service import FakeTinker

pytest.importorskip("tinker", reason="the SDK of Tinker is not installed (the extra tinker)")
__all__ = ["service"]
PROMPTS = [(5, 6, 7), (40, 41), (9, 8, 7, 6)]


def engine(url: str, **backend: object) -> Engine:
    loaded = outline()
    return build_engine(EngineSetup(config(url, backend=backend), lambda: loaded, 1))


@pytest.fixture
def url(service: tuple[FakeTinker, str]) -> Iterator[str]:
    yield service[1]
    service[0].faults.clear()


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check, url: str) -> None:
    subject = engine_contract.Subject(
        lambda: engine(url), PROMPTS, lambda: [("tiny", torch.empty(0))], frozenset({1}), max_new_tokens=12,
        decode_text=lambda ids: tiny.tokenizer().decode(ids, skip_special_tokens=False), resumes_exactly=False,
        under_way=4,
    )  # fmt: skip
    asyncio.run(check(subject))


def request(num: int = 12, **changes: object) -> ExtendRequest:
    return replace(ExtendRequest("0-0", Prompt(PROMPTS[0]), (), num, 7, SamplingParams()), **changes)


def test_images_end_the_engine(url: str) -> None:
    """EngineDied ends the run: no prompt with an image is asked for again."""
    media = Media("a.png", "", (8, 8), 1, 1)

    async def work() -> None:
        of = engine(url)
        with pytest.raises(EngineDied, match=r"rollouts show images \(a.png\), and .* take text alone"):
            await of.extend(request(prompt=Prompt(PROMPTS[0], (media,))))
        await of.close()

    asyncio.run(work())


def test_interruption_loses_only_the_running_chunk(service: tuple[FakeTinker, str], url: str) -> None:
    """The third call of four hangs: the eight tokens of the first two are there, and the rest is that of the whole."""
    fake = service[0]

    async def interrupted() -> tuple[list[int], list[int], list[int]]:
        of = engine(url)
        whole = tokens_of(await of.extend(request()))
        asked = len(fake.named("asample"))
        fake.faults = {"asample": [0.0, 0.0, 1.5]}
        extend = asyncio.ensure_future(of.extend(request()))
        while len(fake.named("asample")) < asked + 2 or len(tokens_of((await of.progress(["0-0"]))["0-0"])) < 8:
            await asyncio.sleep(0.01)
        of.interrupt(["0-0"])
        segments = await asyncio.wait_for(extend, 1.0)
        assert segments[-1].stop_reason is StopReason.PAUSED
        first = tokens_of(segments)
        rest = await of.extend(request(12 - len(first), generated_ids=tuple(first)))
        await of.close()
        return whole, first, tokens_of(rest)

    whole, first, rest = asyncio.run(interrupted())
    assert first == whole[:8] and first + rest == whole


def test_logprob_above_0_is_refused(service: tuple[FakeTinker, str], url: str) -> None:
    """As a remote server's: taken for 0, it would become an importance weight."""

    async def wrong() -> None:
        of = engine(url)
        service[0].logprob_error = np.float32(100.0)
        try:
            await of.extend(request())
        finally:
            service[0].logprob_error = np.float32(0.0)
            await of.close()

    with pytest.raises(InvalidAnswer, match=r"the service gave token \d+ the invalid log-prob 9"):
        asyncio.run(wrong())


def test_unanswered_call_fails_with_a_message(service: tuple[FakeTinker, str], url: str) -> None:
    async def failing() -> None:
        of = engine(url, timeout_s=0.4)
        service[0].faults = {"asample": [3.0]}
        try:
            await of.extend(request())
        finally:
            await of.close()

    with pytest.raises(RuntimeError, match=r"failed at sampling: there was no answer within backend.timeout_s = 0.4 s"):
        asyncio.run(failing())


def test_session_that_opens_after_the_timeout_is_closed(service: tuple[FakeTinker, str], url: str) -> None:
    fake = service[0]
    ended = fake.num_ended
    fake.faults = {"create_session": [1.0]}
    with pytest.raises(RuntimeError, match=r"failed at opening a session: there was no answer within"):
        engine(url, timeout_s=0.3)
    until = time.monotonic() + 60
    while fake.num_ended == ended:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_session_without_engine_is_closed(service: tuple[FakeTinker, str], url: str) -> None:
    fake = service[0]
    ended = fake.num_ended
    fake.faults = {"create_sampling_session": [400]}
    with pytest.raises(RuntimeError, match=r"failed at opening tiny"):
        engine(url)
    assert fake.num_ended == ended + 1
