"""Servers that answer what no server should: it costs no token, and the others go on."""

from __future__ import annotations

import asyncio
import json

import pytest

from contract import engine_contract
from contract.test_remote_engine import WEIGHTS, Made, all_serve, config, made, request, run, same, text_of
from rollover.engine.remote.engine import RemoteEngine, RemoteSetup
from rollover.engine.remote.hosts import UrlHost
from rollover.engine.remote.server import Server

__all__ = ["made"]

PAGE = b"<!DOCTYPE html><html><h1>It works!</h1></html>"
RUBBISH = [PAGE, b"[]", b'"x"', b"\xff\xfe", b'{"data": {"a": 1}}', b'{"data": ["x"]}', b"[" * 100_000]


@pytest.mark.parametrize("path", ["/weight_info", "/v1/models"])
def test_another_program_in_place_of_a_server_costs_no_token(path: str, made: Made) -> None:
    """While it joins, and while it serves."""
    server = made.server()
    odd = {body: made.server() for body in RUBBISH}

    def answer(with_rubbish: bool) -> None:
        for body, each in odd.items():
            each.faults.answers = {path: body} if with_rubbish else {}

    async def work(engine: RemoteEngine) -> None:
        answer(with_rubbish=True)
        same(await engine.extend(request()), server, request())
        answer(with_rubbish=False)
        await all_serve(engine)
        answer(with_rubbish=True)
        while path == "/weight_info" and engine.stats()["engine/servers"] > 1:
            await asyncio.sleep(0.01)
        await engine.load_weights(1, WEIGHTS)
        same(await engine.extend(request(1)), server, request(1), version=1)

    run(made, server, *odd.values(), work=work, server_timeout_s=2.0)


def chunk(*tokens: object, logprob: object = -1.0, **more: object) -> bytes:
    content = [{"logprob": logprob} for _ in tokens]
    choice = {"token_ids": tokens, "logprobs": {"content": content}, **more}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n"


NO_TOKENS = [
    PAGE,
    b"data: " + PAGE + b"\n",
    b"data: \xff\xfe\n",
    b"data: " + b"[" * 100_000 + b"\n",
    b"data: [1]\ndata: null\n",
    b'data: {"choices": 5}\n',
    b'data: {"choices": [], "usage": []}\n',
    b'data: {"choices": [], "usage": [1]}\n',
    chunk(-1),
    chunk(10**6),
    chunk(2**40),
    chunk(None),
    chunk(1, logprob="x"),
    chunk(1, logprob=None),
    chunk(1.5),
    chunk(float("inf")),
    chunk(finish_reason="length", weight_versions=[7]),
    chunk(finish_reason="length", weight_versions=7),
]


def test_what_is_no_token_is_nobodys(made: Made) -> None:
    """Of two rollouts one is sent to each server: what the odd one says is asked of the other one again."""
    server, odd = made.server(), made.server()

    async def work(engine: RemoteEngine) -> None:
        await all_serve(engine)
        for i, body in enumerate(NO_TOKENS):
            odd.faults.answers = {"/inference/v1/generate": body}
            wanted = [request(0, rollout_id=f"{2 * i + j}-0") for j in range(2)]
            for answer in await asyncio.gather(*map(engine.extend, wanted)):
                same(answer, server, wanted[0])
            assert engine.stats()["engine/lost_requests"] > i

    run(made, server, odd, work=work)


def test_a_proxy_of_the_environment_is_for_others(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on machines of which only a proxy reaches the world."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    server = made.server()

    async def work(engine: RemoteEngine) -> None:
        assert engine.max_tokens == 2**20
        same(await engine.extend(request()), server, request())

    run(made, server, work=work, give_up_s=5.0)


class Unlucky(UrlHost):
    """The disk is full when it is to be started, at first."""

    tries = 0

    async def ready(self) -> Server:
        self.tries += 1
        if self.tries < 3:
            raise OSError(28, "No space left on device")
        return await super().ready()


def test_a_server_that_cannot_be_started_now_is_tried_again(made: Made) -> None:
    server = made.server()

    async def work(engine: RemoteEngine) -> None:
        same(await engine.extend(request()), server, request())

    async def limited() -> None:
        setup = RemoteSetup(config(server), lambda: WEIGHTS, text_of, made.said.append, hosts=[Unlucky(server.url)])
        engine = RemoteEngine(setup)
        try:
            await asyncio.wait_for(work(engine), 300)
        finally:
            await engine.close()

    asyncio.run(limited())
    assert any("No space left on device" in line for line in made.said)


def test_a_server_that_another_run_uses_too_is_told_as_such(made: Made) -> None:
    server = made.server(delay_s=0.005)

    async def work(engine: RemoteEngine) -> None:
        await engine.load_weights(1, WEIGHTS)
        extend = asyncio.ensure_future(engine.extend(request(max_new_tokens=40)))
        await engine_contract.wait_for_tokens(engine, "0-0", 3, extend)
        server.label = "another/1"
        same(await extend, server, request(max_new_tokens=40), version=1)

    run(made, server, work=work)
    assert any("'another/1'" in line and "another run uses it, too" in line for line in made.said), made.said
