"""The engine over HTTP on `rollover serve` with a tiny model: the contract, and servers of its own that die."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

import tiny
from contract import engine_contract
from contract.engine_contract import logprobs_of, tokens_of
from heard import hear
from local_trainer import local_trainer
from rollover.config import AlgorithmConfig, Config, EngineConfig, LoraConfig, TrainConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.engine.remote.engine import RemoteEngine, RemoteSetup
from rollover.engine.remote.hosts import ProcessHost, UrlHost
from rollover.http_guard import TOKEN_VARIABLE
from rollover.models.load import load_model
from rollover.run.setup import EvalComponents
from rollover.trainer.batch import Batch
from rollover.trainer.trainer import Trainer
from rollover.types import Prompt, Sample, SamplingParams, Segment
from samples import random_samples

PROMPTS = [(1, 2, 3, 4, 5), (6, 7, 8)]
GREEDY = SamplingParams(temperature=0.0)
START_S = 300.0  # more than any machine takes


def config(folder: Path, **engine: Any) -> Config:
    values = {
        "model": {"path": str(folder), "dtype": "float32", "device": "cpu"},
        "engine": {"kind": "remote", "num_servers": 1, "kv_memory_gb": 0.05, "max_running": 8, "give_up_s": START_S}
        | engine,
        "rollout": {"interrupt": "when_enough", "in_flight_groups": 16, "max_staleness": 1},
        "run": {"threads": 1},
        "algorithm": {"loss": "reinforce"},
    }
    return Config.model_validate(values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ProcessHost]:
    host = ProcessHost(config(model), 0, START_S)
    host.address(START_S)
    yield host
    asyncio.run(host.close())


def weights(model: Path, factor: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    loaded = load_model(config(model).model)
    return [(name, p.detach() * factor) for name, p in loaded.model.named_parameters()]


def over(model: Path, *hosts: ProcessHost | UrlHost, **options: Any) -> RemoteEngine:
    setup = RemoteSetup(config(model), lambda: weights(model), tiny.tokenizer().decode, hosts=hosts or None)
    return RemoteEngine(dataclasses.replace(setup, **options))


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(
    check: Callable[[engine_contract.Subject], Awaitable[None]], model: Path, server: ProcessHost
) -> None:
    subject = engine_contract.Subject(
        make_engine=lambda: over(model, UrlHost(server.address(START_S), server.token)),
        prompts=PROMPTS,
        tensors=lambda: weights(model),
        decode_text=tiny.tokenizer().decode,
        resumes_exactly=False,
        processes_logits=True,
    )

    async def run() -> None:
        await asyncio.wait_for(check(subject), 120)

    asyncio.run(run())


SUBJECT = engine_contract.Subject(make_engine=lambda: None, prompts=PROMPTS)  # type: ignore[arg-type, return-value]


def undisturbed(model: Path, factor: float, request: ExtendRequest) -> tuple[list[int], np.ndarray]:
    """Tokens of a request in this process under the weights times `factor`, and their log-probs."""
    loaded = load_model(config(model).model)
    inline = EmbeddedEngine.over(loaded.model, loaded, config(model))

    async def run() -> tuple[list[int], np.ndarray]:
        await inline.load_weights(1, weights(model, factor))
        answer = await inline.extend(request)
        await inline.close()
        return tokens_of(answer), logprobs_of(answer)

    return asyncio.run(run())


def test_a_server_of_the_run_answers_the_run_alone(server: ProcessHost) -> None:
    """It listens on this machine, but so do web pages in a browser, and programs of others."""
    url = server.address(START_S)

    async def ask(token: str, **headers: str) -> tuple[int, int]:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"} | headers) as session:
            async with session.get(f"{url}/v1/models") as read, session.post(f"{url}/resume") as changed:
                return read.status, changed.status

    assert len(server.token) > 30 and os.environ.get(TOKEN_VARIABLE, "") == ""
    assert asyncio.run(ask("")) == asyncio.run(ask("x")) == (401, 401)
    assert asyncio.run(ask(server.token)) == asyncio.run(ask(server.token, ServerHost="node-7:80")) == (200, 200)
    with open(f"/proc/{server.pid}/cmdline") as command:  # every user of the machine can read it
        assert server.token not in command.read()


def test_killed_server_process_is_restarted_without_loss(model: Path) -> None:
    """While it is away the rollout is queued; it goes on under the last weights. At the end no process is left."""
    request = SUBJECT.request(0, GREEDY, max_new_tokens=400)

    async def run() -> list[int]:
        said: list[str] = hear([])
        engine = over(model)
        (host,) = engine.hosts
        assert isinstance(host, ProcessHost)
        try:
            return await killed(engine, host, said)
        finally:
            await engine.close()
            assert host.pid == 0

    async def killed(engine: RemoteEngine, host: ProcessHost, said: list[str]) -> list[int]:
        await engine.load_weights(3, weights(model, 1.05))
        extend = asyncio.ensure_future(engine.extend(request))
        await engine_contract.wait_for_tokens(engine, "0-0", 3, extend)
        first = host.pid
        os.kill(first, signal.SIGKILL)
        queued = False
        while not extend.done():
            queued = queued or await engine.queued(["0-0"]) == {"0-0"}
            await asyncio.sleep(0.01)
        answer = extend.result()
        assert queued and host.pid != first and [s.policy_version for s in answer] == [3]
        assert engine.stats()["engine/ejections"] == 1 and "is ejected" in said[0]
        return tokens_of(answer)

    tokens, _ = undisturbed(model, 1.05, request)
    assert asyncio.run(run()) == tokens


def test_servers_get_adapters_merged_into_weights(model: Path, server: ProcessHost, tmp_path, monkeypatch) -> None:
    """What is sampled after some updates is of the trained policy, and so is what a saved adapter answers."""
    torch.manual_seed(0)
    trainer = local_trainer(
        load_model(config(model).model), TrainConfig(learning_rate=1e-2, num_steps=3), AlgorithmConfig(),
        dtype=torch.float32, max_new_tokens=24, lora=LoraConfig(rank=4), merges_lora=True,
    )  # fmt: skip
    request = ExtendRequest("r", Prompt(PROMPTS[0]), (), 24, 1, SamplingParams(temperature=1.0))

    def apart(answer: list[Segment], trainer: Trainer) -> float:
        tokens = np.array(tokens_of(answer), dtype=np.int32)
        none = np.zeros(len(tokens))
        prompt = np.array(request.prompt.ids, dtype=np.int32)
        versions, advantages = none.astype(np.int32), none.astype(np.float32)
        sample = Sample(
            "r",
            0,
            prompt,
            tokens,
            none == 0,
            {"behavior_logprobs": logprobs_of(answer), "versions": versions, "advantages": advantages},
            1.0,
        )
        (ours,) = trainer.backend.compute_logprobs([sample]).values()
        return float(np.abs(ours - logprobs_of(answer)).max())

    async def run() -> None:
        engine = over(model, UrlHost(server.address(START_S), server.token))
        before = await engine.extend(request)
        assert apart(before, trainer) < 1e-4
        for step in (1, 2, 3):
            trainer.train_step(Batch(random_samples(step)))
            await engine.load_weights(step, await trainer.backend.publish())
        assert apart(await engine.extend(request), trainer) < 1e-4 < 1e-2 < apart(before, trainer)
        await engine.close()
        trainer.backend.save_model(tmp_path)
        monkeypatch.setenv(TOKEN_VARIABLE, server.token)
        url = EngineConfig(kind="remote", urls=[server.address(START_S)])
        served = config(model).model_copy(update={"engine": url})
        parts = await EvalComponents.build(served, str(tmp_path), with_rewards=False)
        assert apart(await parts.engine.extend(request), trainer) < 1e-4
        await parts.close()

    asyncio.run(run())


@pytest.mark.parametrize("has_logs", [True, False])
def test_a_server_that_cannot_start_says_how_it_ended(has_logs: bool, model: Path, tmp_path: Path, monkeypatch) -> None:
    """Its last words, and where the others are, if they are anywhere for long."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    logs = tmp_path / "logs" if has_logs else None
    host = ProcessHost(config(model), 7, START_S, logs)
    with pytest.raises(RuntimeError, match=r"(?s)without printing its address .exit code 1.*: it is broken") as raised:
        host.address(START_S)
    asyncio.run(host.close())
    assert (str(tmp_path / "logs" / "server-7.log") in str(raised.value)) == has_logs
    assert logs is None or "it is broken" in (logs / "server-7.log").read_text()
