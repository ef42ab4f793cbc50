"""Servers that answer what no server should: it costs no token, and the others go on."""

from __future__ import annotations

import asyncio
import json

import pytest

from contract import engine_contract
from contract.test_remote_engine import WEIGHTS, Made, all_serve, config, made, request, run, same, text_of
from rollover.engine.remote import client as remote_client
from rollover.engine.remote.client import ServerClient, ServerFailed
from rollover.engine.remote.engine import RemoteEngine, RemoteSetup
from rollover.engine.remote.hosts import UrlHost

__all__ = ["made"]

GENERATE = "/inference/v1/generate"
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
    chunk(True),
    chunk(1, logprob=True),
    chunk(1, logprob=3.0),
    chunk(1, logprob=0.01),
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
            odd.faults.answers = {GENERATE: body}
            wanted = [request(0, rollout_id=f"{2 * i + j}-0") for j in range(2)]
            for answer in await asyncio.gather(*map(engine.extend, wanted)):
                same(answer, server, wanted[0])
            assert engine.stats()["engine/lost_requests"] > i

    run(made, server, odd, work=work)


UNREADABLE = [
    ("application/json", b"[" * 200_000),
    ("application/json", b'{"error": ' * 100_000),
    ("text/plain; charset=base64", b"eA=="),  # a codec of Python's, and no text encoding
    ("text/plain; charset=no-such-charset", b"x"),
    ("application/json; charset=utf-16", b"{}"),
]


@pytest.mark.parametrize("path", [GENERATE, "/update_weights", "/weight_info"])
def test_an_error_that_cannot_be_read_is_a_failure_of_its_server(path: str, made: Made) -> None:
    """So that the server is probed, or given up: it is no failure of the engine."""
    server, odd = made.server(), made.server()

    async def work(engine: RemoteEngine) -> None:
        await all_serve(engine)
        few = UNREADABLE if path == GENERATE else UNREADABLE[1:3]  # each of the others is a back-off
        for i, failure in enumerate(few):
            odd.faults.failures = {path: failure}
            if path == "/update_weights":
                await engine.load_weights(i + 1, WEIGHTS)
            wanted = [request(0, rollout_id=f"{2 * i + j}-0") for j in range(2)]
            for answer in await asyncio.gather(*map(engine.extend, wanted)):
                same(answer, server, wanted[0], version=engine.oldest_version)
            if path == GENERATE:
                assert engine.stats()["engine/lost_requests"] > i
                continue
            while engine.stats()["engine/ejections"] <= i:
                await asyncio.sleep(0.01)
            odd.faults.failures = {}
            await all_serve(engine)

    run(made, server, odd, work=work, server_timeout_s=2.0)


def test_an_event_or_an_answer_without_end_is_not_kept(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_client, "MOST_ANSWER_BYTES", 10_000)
    server = made.server()
    server.faults.answers = {path: b"x" * 10_001 for path in (GENERATE, "/weight_info")}

    async def ask() -> None:
        client = ServerClient(server.url)
        with pytest.raises(ServerFailed, match="event of more than 10,000 bytes"):
            _ = [data async for data in client.events(GENERATE, {})]
        with pytest.raises(ServerFailed, match="more than 10,000 bytes"):
            await client.get("/weight_info", limit_s=60)
        server.faults.answers[GENERATE] = b"\n".join([b": a comment " + b"x" * 5000] * 9 + [chunk(1)])
        assert [json.loads(data)["choices"][0]["token_ids"] async for data in client.events(GENERATE, {})] == [[1]]
        await client.close()

    asyncio.run(ask())


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

    async def ready(self) -> ServerClient:
        self.tries += 1
        if self.tries < 3:
            raise OSError(28, "No space left on device")
        return await super().ready()


def test_a_server_that_cannot_be_started_now_is_tried_again(made: Made) -> None:
    server = made.server()

    async def work(engine: RemoteEngine) -> None:
        same(await engine.extend(request()), server, request())

    async def limited() -> None:
        setup = RemoteSetup(config(server), lambda: WEIGHTS, text_of, hosts=[Unlucky(server.url)])
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
