"""A server that speaks vLLM's token interface without a model, and fails as it is told to. In a thread, on loopback.

Its tokens are a hash of all tokens before them (and of the seed where it is `seeded`), its log-probs of the weights'
label as well: a rollout that is cut anywhere, and goes on anywhere, is the undisturbed one if nothing is lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from aiohttp import web

FULL = "generate-tokens-"


@dataclass
class Faults:
    """What goes wrong from now on. Lists are used up from their front, one element a request (or an abort, an update).

    `drops`, `errors`, `nans`, `garbled`: after so many tokens of a request the connection breaks, an error event comes,
    a token with no log-prob, or an event that is no text; None: not this time. `aborts`: "swallow" it, or
    "repeat" its answer. `updates`: "refuse" them.
    """

    drops: list[int | None] = field(default_factory=list)
    errors: list[int | None] = field(default_factory=list)
    nans: list[int | None] = field(default_factory=list)
    garbled: list[int | None] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    updates: list[str] = field(default_factory=list)
    shifted_spans: int = 0
    """It says that the last weights came so many tokens later than they did."""
    gateway: int = 0
    """So many requests get a page of somebody in between, in no UTF-8."""
    refuses: dict[str, int] = field(default_factory=dict)
    """path -> the status that it refuses whatever it is asked there with, as if it had been started without it."""
    late_end_s: float = 0.0
    """Between the last token of a stream and its end."""
    deaf: bool = False
    """It answers on, though nobody reads."""
    answers: dict[str, bytes] = field(default_factory=dict)
    """path -> what it answers there with status 200, whatever it is asked."""
    failures: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """path -> content type and body of the status 500 that it answers there, whatever it is asked."""


class FaultServer:
    """`delay_s` before each token; `chunk`: tokens in one event."""

    def __init__(
        self, *, seeded: bool = False, vocab_size: int = 1000, delay_s: float = 0.001, chunk: int = 1, port: int = 0
    ) -> None:
        self.seeded, self.vocab_size, self.delay_s, self.chunk = seeded, vocab_size, delay_s, chunk
        self.faults = Faults()
        self.label = "default"
        self.longest: int | None = 2**20
        """Tokens of a rollout, as it says; None: it does not say."""
        self.request_ids: list[str] = []
        self.num_running = self.most_running = 0
        self.updating = False
        """As in vLLM, a second update cannot begin before the first is finished or refused."""
        self.labels: list[str] = []
        """Of all updates that were finished."""
        self.updates: list[str] = []
        """Paths of the weights that it took."""
        self.calls: list[str] = []
        self.asleep: set[str] = set()
        """Of weights and kv_cache, what it has no memory for."""
        self.salts: list[str | None] = []
        self.cached_tokens = 0
        """What it says of each request's prompt."""
        self.stops: list[list[int]] = []
        self._aborted: dict[str, asyncio.Event] = {}
        self._connections: set[web.StreamResponse] = set()
        self._port, self._loop = port, asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    # Life, from any thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def freeze(self) -> None:
        """From now on it reads, and answers nothing."""
        self._frozen.clear()

    def thaw(self) -> None:
        self._loop.call_soon_threadsafe(self._frozen.set)

    def restart(self) -> None:
        """All connections break, and it has its first weights."""
        asyncio.run_coroutine_threadsafe(self._restart(), self._loop).result(30)

    def close(self) -> None:
        """It is gone, and its port is free."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(30)

    def routes(self) -> list[web.RouteDef]:
        """What it answers."""
        return [
            web.post("/inference/v1/generate", self._generate),
            web.get("/weight_info", self._weight_info),
            web.get("/v1/models", self._models),
            web.post("/abort_requests", self._abort_requests),
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.post("/start_weight_update", self._start_weight_update),
            web.post("/update_weights", self._update_weights),
            web.post("/finish_weight_update", self._finish_weight_update),
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake_up),
        ]

    # Private

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._running, self._frozen, self._stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._running.set()
        self._frozen.set()
        app = web.Application(client_max_size=2**26, middlewares=[self._answer])
        app.router.add_routes(self.routes())
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = runner.addresses[0][1]
        self._ready.set()
        await self._stopped.wait()
        self._frozen.set()
        self._break_connections()
        await runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    @web.middleware
    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if (body := self.faults.answers.get(request.path)) is not None:
            await request.read()
            return web.Response(body=body, content_type="text/html")
        if (failure := self.faults.failures.get(request.path)) is not None:
            await request.read()
            return web.Response(status=500, body=failure[1], headers={"Content-Type": failure[0]})
        if (status := self.faults.refuses.get(request.path)) is not None:
            return _refusal(status)
        return await handler(request)

    def _break_connections(self) -> None:
        for response in list(self._connections):
            if response._req is not None and response._req.transport is not None:  # aiohttp has no name for it
                response._req.transport.abort()

    async def _restart(self) -> None:
        self._break_connections()
        self.label, self.updating = "default", False
        self.asleep.clear()
        self._running.set()

    async def _weight_info(self, request: web.Request) -> web.Response:
        await self._frozen.wait()
        return web.json_response({"weight_version": self.label})

    async def _models(self, request: web.Request) -> web.Response:
        await self._frozen.wait()
        longest = {} if self.longest is None else {"max_model_len": self.longest}
        return web.json_response({"data": [{"id": "fake", **longest}]})

    async def _pause(self, request: web.Request) -> web.Response:
        await self._frozen.wait()
        self.calls.append(f"pause clear_cache={request.query['clear_cache']} mode={request.query['mode']}")
        self._running.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        await self._frozen.wait()
        self._running.set()
        return web.json_response({"status": "resumed"})

    async def _sleep(self, request: web.Request) -> web.Response:
        await self._frozen.wait()
        assert not self.num_running, "it sleeps when nothing runs"
        self.calls.append(f"sleep level={request.query['level']}")
        self.asleep = {"weights", "kv_cache"}
        return web.Response()

    async def _wake_up(self, request: web.Request) -> web.Response:
        await self._frozen.wait()
        tags = request.query.getall("tags")
        self.calls.append(f"wake_up tags={','.join(tags)}")
        self.asleep -= set(tags)
        return web.Response()

    async def _start_weight_update(self, request: web.Request) -> web.Response:
        if self.updating:
            return web.json_response({"error": {"message": "an update is already active"}}, status=500)
        self.updating = True
        return web.json_response({})

    async def _update_weights(self, request: web.Request) -> web.Response:
        await self._frozen.wait()
        info = (await request.json())["update_info"]
        assert not self._running.is_set(), "weights change while it is paused"
        assert "weights" not in self.asleep, "weights need their memory"
        assert self.updating
        if self.faults.updates and self.faults.updates.pop(0) == "refuse":
            self.updating = False
            return web.json_response({"error": {"message": "refused: no"}}, status=500)
        with open(info["path"], "rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == info["sha256"]
        self.updates.append(info["path"])
        return web.json_response({})

    async def _finish_weight_update(self, request: web.Request) -> web.Response:
        if not self.updating:
            return web.json_response({"error": {"message": "no update is active"}}, status=500)
        self.label, self.updating = (await request.json())["weight_version"], False
        self.labels.append(self.label)
        return web.json_response({})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        await self._frozen.wait()
        ids = (await request.json())["request_ids"]
        assert ids and all(each.startswith(FULL) for each in ids)
        self.calls.append("abort")
        for each in ids:
            event = self._aborted.get(each.removeprefix(FULL))
            if event is not None and not (self.faults.aborts and self.faults.aborts[0] == "swallow"):
                event.set()
            elif self.faults.aborts:
                self.faults.aborts.pop(0)
        return web.json_response({"aborted": len(ids)})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        await self._frozen.wait()
        if "request_id" not in body:
            return _refusal(400)
        request_id = body["request_id"]
        assert not self.asleep, "it is asked for tokens while it sleeps"
        assert request_id not in self.request_ids, "an id came twice"
        self.request_ids.append(request_id)
        if self.faults.gateway:
            self.faults.gateway -= 1
            return web.Response(status=502, body=b"Passerelle arr\xeat\xe9e", content_type="text/html")
        self.salts.append(body.get("cache_salt"))
        self.stops.append(body["sampling_params"]["stop_token_ids"])
        self._aborted[request_id] = asyncio.Event()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await response.prepare(request)
            self._connections.add(response)
            await self._stream(body, response, self._aborted[request_id])
        except ConnectionError:
            pass
        finally:
            self.num_running -= 1
            self._connections.discard(response)
        return response

    async def _stream(self, body: dict[str, Any], response: web.StreamResponse, aborted: asyncio.Event) -> None:
        faults, params = self.faults, body["sampling_params"]
        planned = (faults.drops, faults.errors, faults.nans, faults.garbled)
        drop, error, nan, garbled = (each.pop(0) if each else None for each in planned)
        context, labels, waiting = list(body["token_ids"]), [], []
        reason = None
        while reason is None:
            await asyncio.sleep(self.delay_s)
            await self._running.wait()
            await self._frozen.wait()
            if drop == len(labels):
                response._req.transport.abort()  # type: ignore[union-attr]
                return
            if error == len(labels):
                await _send(response, {"error": {"message": "told to fail", "code": 500}})
                return
            if garbled == len(labels):
                await response.write(b'data: {"choices": "\xff\xfe\n\n')
                return
            if aborted.is_set():
                reason = "abort"
            else:
                token = self.token(context, params["seed"], len(labels), params["temperature"])
                logprob = -9999.0 if nan == len(labels) else self.logprob(context, self.label)
                context.append(token)
                labels.append(self.label)
                waiting.append({"token_id": token, "logprob": logprob})
                if token in params["stop_token_ids"]:
                    reason = "stop"
                elif len(labels) == params["max_tokens"]:
                    reason = "length"
            if reason is not None or len(waiting) == self.chunk:
                await self._send_tokens(response, waiting, reason, labels)
                waiting = []
        if reason == "abort" and faults.aborts and faults.aborts[0] == "repeat":
            faults.aborts.pop(0)
            await self._send_tokens(response, [], reason, labels)
        await asyncio.sleep(faults.late_end_s)
        await _send(
            response, {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}}
        )
        await response.write(b"data: [DONE]\n\n")

    async def _send_tokens(
        self, response: web.StreamResponse, waiting: Sequence[dict[str, Any]], reason: str | None, labels: list[str]
    ) -> None:
        choice = {
            "index": 0,
            "token_ids": [each["token_id"] for each in waiting],
            "logprobs": {"content": list(waiting)},
            "finish_reason": reason,
            "weight_versions": None if reason is None else self._spans(labels),
        }
        try:
            await _send(response, {"choices": [choice]})
        except ConnectionError:
            if not self.faults.deaf:
                raise

    def _spans(self, labels: list[str]) -> list[dict[str, Any]]:
        labels = list(labels)
        for i in range(1, len(labels)):
            if labels[i] != labels[i - 1]:
                late = min(self.faults.shifted_spans, len(labels) - i)
                labels[i : i + late] = [labels[i - 1]] * late
                break
        spans, start = [], 0
        for label, same in groupby(labels):
            end = start + len(list(same))
            spans.append({"version": label, "start": start, "end": end})
            start = end
        return spans

    def token(self, context: Sequence[int], seed: int, index: int, temperature: float) -> int:
        """The next one after `context`; `index` within its request."""
        drawn = (seed, index) if self.seeded and temperature > 0 else ()
        return _hash("token", *context, *drawn) % self.vocab_size

    def logprob(self, context: Sequence[int], label: str) -> float:
        """Under the version of this label, whoever's it is."""
        return -(1 + _hash("logprob", label.rpartition("/")[2], *context) % 1000) / 256


def _refusal(status: int) -> web.Response:
    return web.json_response({"error": {"message": "told to refuse", "code": status}}, status=status)


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


def _hash(*parts: object) -> int:
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
