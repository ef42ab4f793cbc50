"""The engine over HTTP passes the contract on real vLLM, and replaces a server whose engine hangs."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from contract import engine_contract
from contract.engine_contract import check_segments, tokens_of
from rollover.engine.protocol import StopCriteria
from rollover.engine.remote.engine import RemoteEngine
from rollover.engine.remote.hosts import ProcessHost
from rollover.types import SamplingParams, StopReason
from vllm_server.engines import ARGS, engine, subject
from vllm_server.serving import VllmServer, alive, descendants, named

pytestmark = pytest.mark.vllm

GREEDY = SamplingParams(temperature=0.0)
TIMEOUT_S = 15.0


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(
    check: Any, server: VllmServer, old: Any, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", server.token)

    def make() -> RemoteEngine:
        return engine(old, model_folder, urls=[server.url], num_servers=0)

    asyncio.run(asyncio.wait_for(check(subject(make, old)), 300))


def test_greedily_it_goes_on_from_every_cut(
    server: VllmServer, old: Any, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen weights, float32: cut after any of its tokens, the rest is that of the uninterrupted rollout."""
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", server.token)
    request = subject(None, old).request(0, GREEDY, max_new_tokens=40)

    async def work() -> None:
        made = engine(old, model_folder, urls=[server.url])
        whole = tokens_of(await made.extend(request))
        rests = [
            dataclasses.replace(
                request, rollout_id=f"{cut}-0", generated_ids=tuple(whole[:cut]), max_new_tokens=40 - cut
            )
            for cut in range(1, 40)
        ]
        for rest, segments in zip(rests, await asyncio.gather(*map(made.extend, rests)), strict=True):
            check_segments(segments, rest)
            assert [*rest.generated_ids, *tokens_of(segments)] == whole
        await made.close()

    asyncio.run(asyncio.wait_for(work(), 300))


def test_a_server_whose_engine_hangs_is_replaced(old: Any, model_folder: Path, tmp_path: Path) -> None:
    """In time, with all of its processes, though the one that hangs can do nothing. Its rollout goes on from the token
    that it had, greedily as if nothing had been."""
    options = {"kv_memory_gb": 0.2, "vllm_args": ARGS, "server_timeout_s": TIMEOUT_S}
    made = engine(old, model_folder, num_servers=1, server="vllm", **options)
    request = subject(None, old).request(0, GREEDY, max_new_tokens=900, stop=StopCriteria())

    async def work() -> None:
        whole = tokens_of(await made.extend(request))
        (host,) = made.hosts
        assert isinstance(host, ProcessHost)
        before = host.pid
        everyone, core = {before, *descendants(before)}, named(before)["core"]
        numbers = itertools.count(1)
        while True:
            waiting = dataclasses.replace(request, rollout_id=f"{next(numbers)}-0")
            extend = asyncio.ensure_future(made.extend(waiting))
            while not extend.done() and not (await made.progress([waiting.rollout_id])).get(waiting.rollout_id):
                await asyncio.sleep(0.01)
            os.kill(core, signal.SIGSTOP)
            await asyncio.sleep(1)  # what it had sent by then arrives
            if not extend.done():
                break
            os.kill(core, signal.SIGCONT)  # on a busy machine all of it may have been sent: once more
            await extend
        started = time.monotonic()
        while not made.stats()["engine/ejections"]:
            await asyncio.sleep(0.05)
        seconds = time.monotonic() - started
        print(f"\ngiven up after {seconds:.1f} s of at most {2 * TIMEOUT_S:.0f}")
        assert seconds < 2 * TIMEOUT_S
        assert await made.queued([waiting.rollout_id]) == {waiting.rollout_id}
        while host.pid in (0, before) or alive(everyone):
            await asyncio.sleep(0.1)
        segments = await extend
        check_segments(segments, request)
        assert tokens_of(segments) == whole and segments[-1].stop_reason is StopReason.LENGTH

    async def limited() -> None:
        try:
            await asyncio.wait_for(work(), 550)
        finally:
            await made.close()

    asyncio.run(limited())
