"""The engine over HTTP passes the contract on real vLLM, and replaces a server whose engine hangs."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import tiny
from contract import engine_contract
from contract.engine_contract import check_segments, tokens_of
from rollover.config import Config
from rollover.engine.remote.engine import RemoteEngine, RemoteSetup
from rollover.engine.remote.hosts import ProcessHost
from rollover.types import StopReason
from vllm_server.serving import VllmServer, named

pytestmark = pytest.mark.vllm


def engine(model: Any, folder: Path, **options: Any) -> RemoteEngine:
    values = {
        "model": {"path": str(folder), "dtype": "float32"},
        "engine": {"kind": "remote", "max_running": 8, **options},
        "rollout": {"interrupt": "when_enough", "in_flight_groups": 16, "max_staleness": 1},
        "algorithm": {"loss": "reinforce"},
    }
    config = Config.model_validate(values)
    return RemoteEngine(RemoteSetup(config, lambda: list(model.named_parameters()), tiny.tokenizer().decode))


def subject(make: Any, model: Any) -> engine_contract.Subject:
    return engine_contract.Subject(
        make_engine=make,
        prompts=[tuple(range(5, 15)), (7, 8, 9), (20,)],
        tensors=lambda: list(model.named_parameters()),
        decode_text=tiny.tokenizer().decode,
        resumes_exactly=False,
    )


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(
    check: Any, server: VllmServer, old: Any, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", server.token)

    def make() -> RemoteEngine:
        return engine(old, model_folder, urls=[server.url], num_servers=0)

    asyncio.run(asyncio.wait_for(check(subject(make, old)), 300))


def test_a_server_whose_engine_hangs_is_replaced(old: Any, model_folder: Path, tmp_path: Path) -> None:
    """Its rollout goes on from the token that it had, greedily as if nothing had been."""
    args = ["--enforce-eager", "--max-model-len", "1024"]
    made = engine(
        old, model_folder, num_servers=1, kv_memory_gb=0.2, server="vllm", vllm_args=args, server_timeout_s=10.0
    )
    request = subject(None, old).request(0, engine_contract.SamplingParams(temperature=0.0), max_new_tokens=900)
    request = dataclasses.replace(request, stop_token_ids=frozenset())

    async def work() -> None:
        whole = tokens_of(await made.extend(request))
        (host,) = made.hosts
        assert isinstance(host, ProcessHost)
        before = host.pid
        extend = asyncio.ensure_future(made.extend(dataclasses.replace(request, rollout_id="1-0")))
        while not (await made.progress(["1-0"])).get("1-0"):
            await asyncio.sleep(0.01)
        os.kill(named(before)["core"], signal.SIGSTOP)
        started = time.monotonic()
        while host.pid == before:
            await asyncio.sleep(0.1)
        print(f"\ngiven up after {time.monotonic() - started:.1f} s of at most 20")
        segments = await extend
        check_segments(segments, request)
        assert tokens_of(segments) == whole and segments[-1].stop_reason is StopReason.LENGTH
        await made.close()

    asyncio.run(asyncio.wait_for(work(), 550))
