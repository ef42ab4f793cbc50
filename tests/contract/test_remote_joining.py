"""Servers that a run cannot use, or that are not there yet: it is said why, and no rollout is lost by it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path

import pytest

from contract.test_remote_engine import WEIGHTS, Made, config, made, request, run, same, text_of
from rollover.engine.protocol import EngineDied
from rollover.engine.remote.client import ServerClient
from rollover.engine.remote.engine import RemoteEngine, RemoteSetup
from rollover.engine.remote.hosts import ProcessHost, UrlHost

__all__ = ["made"]


@pytest.mark.parametrize(
    ("path", "status", "needed"),
    [
        ("/inference/v1/generate", 403, "--enable-scale-out"),
        ("/inference/v1/generate", 404, "--enable-scale-out"),
        ("/weight_info", 404, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_server_that_was_started_without_what_is_needed_gets_no_rollout(
    path: str, status: int, needed: str, made: Made
) -> None:
    lacks, server = made.server(), made.server()
    lacks.faults.refuses = {path: status}

    async def work(engine: RemoteEngine) -> None:
        for i in range(6):
            same(await engine.extend(request(i % 3, rollout_id=f"{i}-0")), server, request(i % 3))
        while not any(needed in line for line in made.said):
            await asyncio.sleep(0.01)
        assert engine.stats()["engine/servers"] == 1 and engine.stats()["engine/lost_requests"] == 0

    run(made, lacks, server, work=work)
    assert any(lacks.url in line and path in line for line in made.said) and not lacks.updates


def test_server_without_max_model_len_joins_beside_another(made: Made) -> None:
    server, silent = made.server(), made.server()
    silent.longest = None

    async def work(engine: RemoteEngine) -> None:
        assert await asyncio.to_thread(lambda: engine.max_tokens) == 2**20
        await engine.extend(request())
        while engine.stats()["engine/servers"] < 2:
            await asyncio.sleep(0.01)

    run(made, server, silent, work=work)


def test_servers_without_max_model_len_alone_are_refused(made: Made) -> None:
    silent = made.server()
    silent.longest = None
    engine = made.engine(silent, give_up_s=1.0)
    with pytest.raises(EngineDied, match="max_model_len"):
        _ = engine.max_tokens
    asyncio.run(engine.close())


def test_without_the_token_of_a_server_it_ends_at_once(made: Made) -> None:
    server = made.server()
    server.faults.refuses = {"/v1/models": 401}
    engine = made.engine(server, give_up_s=600.0)
    with pytest.raises(ValueError, match="ROLLOVER_SERVER_TOKEN"):
        _ = engine.max_tokens
    asyncio.run(engine.close())


def test_who_is_waited_for_is_said_once_before_it_is_given_up(made: Made) -> None:
    gone = made.server()
    gone.close()
    engine = made.engine(gone, give_up_s=1.0)
    with pytest.raises(EngineDied, match="no server of .engine. answered"):
        _ = engine.max_tokens
    asyncio.run(engine.close())
    [line] = made.said
    assert gone.url in line and "waited for" in line


def test_an_engine_without_servers_ends_with_what_each_of_them_said(made: Made) -> None:
    refusing, lacking = made.server(), made.server()
    refusing.faults.updates = ["refuse"] * 100
    lacking.faults.refuses = {"/inference/v1/generate": 403}

    async def work(engine: RemoteEngine) -> None:
        with pytest.raises(EngineDied) as died:
            await engine.extend(request())
        said = str(died.value)
        assert f"{refusing.url}: " in said and "refused: no" in said
        assert f"{lacking.url}: " in said and "--enable-scale-out" in said

    run(made, refusing, lacking, work=work, give_up_s=3.0)


def test_a_server_of_ours_that_ends_before_it_answers_is_started_again(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed for want of memory, say, while the run loads its own model."""
    server = made.server()
    program = tmp_path / "program"
    program.write_text(
        f"#!/bin/sh\necho start >> {tmp_path}/starts\n[ $(wc -l < {tmp_path}/starts) -gt 2 ] || kill -9 $$\n"
        f'echo \'{{"url": "{server.url}"}}\'\nexec sleep 600\n'
    )
    program.chmod(0o755)
    of = config(server, urls=[], num_servers=1)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(program))
        host = ProcessHost(of, 0, 60.0, tmp_path / "logs")
        engine = RemoteEngine(RemoteSetup(of, lambda: WEIGHTS, text_of, hosts=[host]))
        began = time.monotonic()
        assert engine.max_tokens == 2**20
        assert time.monotonic() - began < of.engine.give_up_s
    assert (tmp_path / "starts").read_text().count("start") == 3
    asyncio.run(engine.close())
    assert not host.pid


class Deaf(UrlHost):
    """Forgets that it was cancelled, once: as libraries do whose time-out is up at the same moment."""

    async def ready(self) -> ServerClient:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        await asyncio.sleep(3600)
        return await super().ready()


def test_an_engine_is_closed_also_where_a_cancellation_is_forgotten(made: Made) -> None:
    server = made.server()

    async def work() -> None:
        setup = RemoteSetup(config(server), lambda: WEIGHTS, text_of, hosts=[Deaf(server.url)])
        engine = RemoteEngine(setup)
        await engine.load_weights(0, WEIGHTS)
        await asyncio.sleep(0.1)
        await asyncio.wait_for(engine.close(), 60)

    asyncio.run(work())
