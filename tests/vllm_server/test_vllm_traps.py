"""Traps 1 to 5 of vLLM's server: each as it is, and what our client does about it. (6 to 8: test_vllm_updates.py.)"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from contract.engine_contract import check_segments, tokens_of, wait_for_tokens
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.engine.remote.client import ServerClient
from rollover.engine.remote.dialect import Chunk, GenerateRequest
from rollover.engine.remote.engine import RemoteEngine
from rollover.engine.remote.vllm import VllmDialect
from rollover.types import Prompt, SamplingParams, Segment, StopReason
from vllm_server.engines import engine, subject
from vllm_server.serving import VllmServer, wait_until

pytestmark = pytest.mark.vllm

PROMPT = list(range(5, 25))
GREEDY = SamplingParams(temperature=0.0)
LONG = 900  # tokens: it runs for seconds
Work = Callable[[RemoteEngine], Coroutine[Any, Any, None]]


@pytest.fixture
def over(server: VllmServer, old: Any, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Does some work with an engine over the server."""
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", server.token)

    def run(work: Work, **options: Any) -> None:
        async def limited() -> None:
            made = engine(old, model_folder, urls=[server.url], **options)
            try:
                await asyncio.wait_for(work(made), 200)
            finally:
                await made.close()

        asyncio.run(limited())

    return run


def wanted(i: int = 0, **changes: Any) -> ExtendRequest:
    values = {"prompt": Prompt.of(PROMPT), "max_new_tokens": LONG, "stop": StopCriteria()}
    return subject(None, None).request(i, **values | changes)


async def interrupted(made: RemoteEngine) -> list[Segment]:
    """A long rollout that is interrupted after some tokens."""
    extend = asyncio.ensure_future(made.extend(wanted()))
    await wait_for_tokens(made, "0-0", 5, extend)
    made.interrupt(["0-0"])
    segments = await extend
    check_segments(segments, wanted())
    assert segments[-1].stop_reason is StopReason.PAUSED and 5 <= len(tokens_of(segments)) < LONG
    return segments


# 1: the same id twice


def test_trap_1_a_repeated_id_runs_twice(server: VllmServer) -> None:
    """Each answers 200, and the one that is meant by an abort cannot be told from the other."""
    twice = [server.generate(PROMPT, "same", max_tokens=LONG, seed=seed).wait(5) for seed in (1, 2)]
    server.abort("generate-tokens-same")
    for stream in twice:
        stream.wait()
    assert [stream.finish_reason for stream in twice] == ["abort", "abort"]
    assert twice[0].tokens[:5] != twice[1].tokens[:5]


def test_no_request_of_ours_has_the_id_of_another(over: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rollout goes on, or was abandoned, or another engine asks for it after a restart."""
    ids: list[str] = []
    generate = VllmDialect.generate

    def noted(dialect: VllmDialect, client: ServerClient, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        ids.append(request.request_id)
        return generate(dialect, client, request)

    monkeypatch.setattr(VllmDialect, "generate", noted)

    async def work(made: RemoteEngine) -> None:
        abandoned = asyncio.ensure_future(made.extend(wanted()))
        await wait_for_tokens(made, "0-0", 5, abandoned)
        abandoned.cancel()
        await asyncio.wait([abandoned])
        segments = await interrupted(made)
        rest = wanted(generated_ids=tuple(tokens_of(segments)), max_new_tokens=3)
        check_segments(await made.extend(rest), rest)

    for _ in range(2):
        over(work)
    assert len(set(ids)) == len(ids) == 6 and {i.partition(".")[0] for i in ids} == {"0-0"}


# 2: an abort by the bare id


def test_trap_2_only_the_full_id_aborts(server: VllmServer) -> None:
    stream = server.generate(PROMPT, max_tokens=LONG).wait(5)
    server.abort(stream.id)
    num = len(stream.tokens)
    stream.wait(num + 20)
    assert not stream.ended, "the bare id does nothing"
    server.abort(f"generate-tokens-{stream.id}")
    stream.wait()
    assert stream.finish_reason == "abort" and stream.spans and stream.spans[-1]["end"] == len(stream.tokens) < LONG


@pytest.mark.parametrize("full", [True, False])
def test_an_interruption_aborts_by_the_full_id(over: Any, monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """By the bare one the server goes on, until nobody waits for it any more."""

    async def by_the_bare_id(dialect: VllmDialect, client: ServerClient, request_id: str, limit_s: float) -> None:
        await client.post("/abort_requests", {"request_ids": [request_id]}, limit_s=limit_s)

    if not full:
        monkeypatch.setattr(VllmDialect, "abort", by_the_bare_id)

    async def work(made: RemoteEngine) -> None:
        await interrupted(made)
        assert made.stats()["engine/abandoned_requests"] == (0 if full else 1)

    over(work, grace_s=60.0 if full else 0.3)


# 3: an abort that comes before its request


def test_trap_3_an_abort_before_its_request_is_lost(server: VllmServer) -> None:
    full_id = "generate-tokens-early"
    server.abort(full_id)
    stream = server.generate(PROMPT, "early", max_tokens=LONG).wait(20)
    assert not stream.ended, "the early abort was lost"

    def aborted_again() -> bool:
        server.abort(full_id)
        return stream.ended

    wait_until(aborted_again)
    assert stream.finish_reason == "abort"


@pytest.mark.parametrize("again", [True, False])
def test_an_abort_that_overtook_its_request_is_repeated(
    over: Any, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Told once only, the server goes on, until nobody waits for it any more."""
    aborts = 0
    generate, abort = VllmDialect.generate, VllmDialect.abort
    overtaken = asyncio.Event()

    async def late(dialect: VllmDialect, client: ServerClient, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        await overtaken.wait()
        async with contextlib.aclosing(generate(dialect, client, request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def counted(dialect: VllmDialect, client: ServerClient, request_id: str, limit_s: float) -> None:
        nonlocal aborts
        aborts += 1
        if aborts > 1 and not again:
            return
        await abort(dialect, client, request_id, limit_s)
        overtaken.set()

    monkeypatch.setattr(VllmDialect, "generate", late)
    monkeypatch.setattr(VllmDialect, "abort", counted)

    async def work(made: RemoteEngine) -> None:
        extend = asyncio.ensure_future(made.extend(wanted()))
        while made.stats()["engine/prefill_tokens"] == 0:  # it is about to be asked for
            await asyncio.sleep(0.01)
        made.interrupt(["0-0"])
        segments = await extend
        assert overtaken.is_set() and len(tokens_of(segments)) < LONG
        assert segments[-1].stop_reason is StopReason.PAUSED
        assert made.stats()["engine/abandoned_requests"] == (0 if again else 1)

    over(work, grace_s=60.0 if again else 0.5)
    assert aborts >= 2


# 4: a stop string across a cut


@pytest.mark.usefixtures("restored")
def test_trap_4_a_stop_string_across_a_cut_is_missed_by_the_server_and_found_by_us(
    server: VllmServer, model_folder: Path, over: Any
) -> None:
    tokens = server.generate(PROMPT, temperature=0.0, max_tokens=24).wait().tokens
    stop = AutoTokenizer.from_pretrained(model_folder).decode(tokens[4:6])
    whole = server.generate(PROMPT, temperature=0.0, max_tokens=24, stop=[stop]).wait()
    assert whole.finish_reason == "stop" and len(whole.tokens) <= 6
    held = tokens[: len(whole.tokens) - 1]
    rest = server.generate([*PROMPT, *held], temperature=0.0, max_tokens=1, stop=[stop]).wait()
    assert rest.tokens == [whole.tokens[-1]] and rest.finish_reason == "length", "it stood across the cut"

    async def work(made: RemoteEngine) -> None:
        request = wanted(
            sampling=GREEDY, stop=StopCriteria(strings=(stop,)), generated_ids=tuple(held), max_new_tokens=24
        )
        (segment,) = await made.extend(request)
        assert segment.token_ids.tolist() == [whole.tokens[-1]] and segment.stop_reason is StopReason.STOP_STRING

    over(work)


# 5: an engine that hangs behind a server that answers


def test_trap_5_a_hung_engine_looks_healthy(server: VllmServer) -> None:
    """So /weight_info is the probe: test_vllm_engine.py has what follows of it."""
    pids = server.processes()
    os.kill(pids["core"], signal.SIGSTOP)
    try:
        assert server.status("GET", "/health") == 200
        with pytest.raises(TimeoutError):
            server.status("GET", "/weight_info", limit_s=3)
    finally:
        os.kill(pids["core"], signal.SIGCONT)
    assert server.label
