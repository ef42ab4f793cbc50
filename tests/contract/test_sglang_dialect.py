"""An engine over servers that do not speak as vLLM's do: the example of a dialect, and a fake server of its kind."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from contract import engine_contract, sglang_dialect
from contract.engine_contract import tokens_of
from contract.test_remote_engine import NUM, SUBJECT, WEIGHTS, all_serve, config, text_of
from fault_server import FaultServer
from rollover.config import Config
from rollover.config.logits import LogitsProcessing
from rollover.engine.protocol import EngineDied
from rollover.engine.remote.client import ServerFailed
from rollover.engine.remote.engine import RemoteEngine, RemoteSetup
from rollover.functions import FunctionError
from rollover.types import Media, Prompt, StopReason

DIALECT = f"{sglang_dialect.__file__}:SglangDialect"


class FakeSglang(FaultServer):
    """The tokens of FaultServer, in events that have all tokens of their request so far."""

    refused = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self.generate),
            web.post("/abort_request", self.abort),
            web.post("/update_weights_from_disk", self.update),
            web.get("/health_generate", self.health),
            web.get("/get_model_info", self.model_info),
            web.get("/get_server_info", self.server_info),
        ]

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake", "weight_version": self.label})

    async def server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"max_req_input_len": 4096})

    async def abort(self, request: web.Request) -> web.Response:
        self.calls.append((await request.json())["rid"])
        return web.Response()

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert not self.num_running, "as it keeps no request"
        if self.refused:
            self.refused -= 1
            return web.json_response({"success": False, "message": "no room"}, status=400)
        assert {file.name for file in Path(body["model_path"]).iterdir()} == {"model.safetensors"}
        self.updates.append(body["model_path"])
        self.label = body["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params, context, ids, logprobs, reason = body["sampling_params"], list(body["input_ids"]), [], [], None
        assert body["return_logprob"] and body["stream"] and params["ignore_eos"]
        if len(context) > 4096:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.num_running += 1
        try:
            while reason is None:
                await asyncio.sleep(self.delay_s)
                if body["rid"] in self.calls:
                    reason = "abort"
                else:
                    banned = params["logit_bias"]
                    draws = (
                        self.token(context, params["sampling_seed"], len(ids) + 7919 * i, params["temperature"])
                        for i in range(99)
                    )
                    token = next(token for token in draws if str(token) not in banned)
                    ids.append(token)
                    logprobs.append([self.logprob(context, self.label), token, None])
                    context.append(token)
                    if token in params["stop_token_ids"]:
                        reason = "stop"
                    elif len(ids) == params["max_new_tokens"]:
                        reason = "length"
                info = {
                    "output_token_logprobs": logprobs,
                    "finish_reason": reason and {"type": reason},
                    "cached_tokens": self.cached_tokens,
                }
                await self.send(response, {"text": "", "output_ids": ids, "meta_info": info})
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:
            pass
        finally:
            self.num_running -= 1
        return response

    async def send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())


@pytest.fixture
def server() -> Iterator[FakeSglang]:
    server = FakeSglang(seeded=True)
    yield server
    server.close()


def settings(server: FaultServer, dialect: str = DIALECT, **engine: Any) -> Config:
    return config(server, dialect=dialect, **engine)


def engine_over(server: FaultServer, **options: Any) -> RemoteEngine:
    setup = RemoteSetup(settings(server), lambda: WEIGHTS, text_of, lambda: server.vocab_size)
    return RemoteEngine(dataclasses.replace(setup, **options))


def run(work: Callable[[RemoteEngine], Awaitable[None]], server: FaultServer, **options: Any) -> None:
    async def limited() -> None:
        engine = engine_over(server, **options)
        try:
            await asyncio.wait_for(work(engine), 120)
        finally:
            await engine.close()

    asyncio.run(limited())


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[engine_contract.Subject], Awaitable[None]], server: FakeSglang) -> None:
    subject = dataclasses.replace(
        SUBJECT, make_engine=lambda: engine_over(server), decode_text=text_of, resumes_exactly=False
    )

    async def limited() -> None:
        await asyncio.wait_for(check(subject), 120)

    asyncio.run(limited())


def test_new_weights_end_its_requests_and_lose_no_token(server: FakeSglang) -> None:
    server.seeded, server.delay_s = False, 0.01
    wanted = SUBJECT.request(0, max_new_tokens=60)

    async def work(engine: RemoteEngine) -> None:
        extend = asyncio.ensure_future(engine.extend(wanted))
        await engine_contract.wait_for_tokens(engine, "0-0", 3, extend)
        await engine.load_weights(1, WEIGHTS)
        old, new = await extend
        assert (old.policy_version, new.policy_version, new.stop_reason) == (0, 1, StopReason.LENGTH)
        context = list(wanted.prompt.ids)
        for token in tokens_of([old, new]):
            assert token == server.token(context, 0, 0, 1.0)
            context.append(token)
        stats = engine.stats()
        assert (len(context), len(server.calls), len(server.updates)) == (63, 1, 2)
        assert stats["engine/lost_requests"] == stats["engine/abandoned_requests"] == stats["engine/ejections"] == 0
        assert stats["engine/reprefill_tokens"] == len(wanted.prompt) + len(old)

    run(work, server)


def test_refused_weights_are_sent_again(server: FakeSglang) -> None:
    async def work(engine: RemoteEngine) -> None:
        await all_serve(engine)
        server.refused = 1
        await engine.load_weights(1, WEIGHTS)
        assert server.label.endswith("/1") and engine.stats()["engine/refused_weights"] == 1

    run(work, server)


def test_banned_tokens_and_the_longest_rollout_are_its_own(server: FakeSglang) -> None:
    server.seeded = False
    first = server.token(SUBJECT.request().prompt.ids, 0, 0, 1.0)
    server.seeded = True

    async def work(engine: RemoteEngine) -> None:
        assert engine.max_tokens == 4096
        banned = LogitsProcessing(logit_bias=tuple((token, -100.0) for token in (first, 5)))
        answers = [await engine.extend(SUBJECT.request(i, processing=banned)) for i in range(3)]
        assert not {first, 5}.intersection(*map(tokens_of, answers)) and len(tokens_of(answers[0])) == NUM

    run(work, server)


def test_what_it_cannot_do_is_said(server: FakeSglang) -> None:
    image = Media("a.png", "", (8, 8), 0, 2)

    class Plain(sglang_dialect.SglangDialect):
        processes_logits = False

    sglang_dialect.Plain = Plain  # type: ignore[attr-defined]
    plain = settings(server, f"{sglang_dialect.__name__}:Plain")

    async def work(engine: RemoteEngine) -> None:
        with pytest.raises(EngineDied, match=r"prompts show images \(a.png\), and servers of engine.dialect = .* none"):
            await engine.extend(SUBJECT.request(prompt=Prompt((1, 2, 3), (image,))))
        other = RemoteEngine(RemoteSetup(plain, lambda: WEIGHTS, text_of))
        with pytest.raises(ValueError, match="has its logits changed .* cannot do that"):
            await other.extend(SUBJECT.request(processing=LogitsProcessing(min_new_tokens=2)))
        await other.close()

    run(work, server)


def test_a_dialect_is_a_class_of_ones_own(server: FakeSglang, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='engine.dialect = "nope" is none of vllm, and no function'):
        settings(server, "nope")
    with pytest.raises(ValueError, match="engine.dialect = .* with engine.num_servers"):
        settings(server, num_servers=1)
    (tmp_path / "mine.py").write_text("def make(config): return 3\n")
    bad = settings(server, f"{tmp_path}/mine.py:make")
    with pytest.raises(FunctionError, match="a dialect with abort, .*engine/remote/dialect.py"):
        RemoteEngine(RemoteSetup(bad, lambda: WEIGHTS, text_of))


@pytest.mark.parametrize(
    "event",
    [
        {},
        [],
        {"error": {"message": "no"}},
        {"output_ids": [5], "meta_info": {"output_token_logprobs": [], "finish_reason": None}},
        {"output_ids": [5], "meta_info": {"output_token_logprobs": [[-1.0, 6, None]], "finish_reason": None}},
        {"output_ids": [-5], "meta_info": {"output_token_logprobs": [[-1.0, -5, None]], "finish_reason": None}},
        {"output_ids": [5], "meta_info": {"output_token_logprobs": [["x", 5, None]], "finish_reason": None}},
    ],
)
def test_what_is_no_event_is_a_failure_of_its_server(event: object) -> None:
    with pytest.raises(ServerFailed):
        sglang_dialect.parse_event(json.dumps(event), 0)
