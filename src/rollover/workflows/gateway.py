"""The gateway: an HTTP server of the OpenAI API for the agents of a run's workflow, on this machine only.

    GET  /v1/models
    POST /v1/chat/completions     streaming or not
    POST /v1/completions          a text or token ids

The API key identifies the trajectory; its Episode answers the calls (episodes.py). While a call waits for the policy,
white space before the JSON, or comments in a stream, keep the connection alive. The headers go out with the first such
byte, so a call that is refused at once gets its own HTTP status.

A client that times out closes its connection and retries. The retry receives the answer that was sampled meanwhile:
sampling again would leave a turn that no client has.

    request ──▶ in flight ──answered──▶ delivered (removed)
                   └──disconnected──▶ orphan ──equal retry──▶ in flight
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollover.functions import explained
from rollover.http_server import LOOPBACK, HttpServer, body_of, until_gone
from rollover.openai_wire import (
    Answer,
    ChatRequest,
    Choice,
    CompletionRequest,
    Refusal,
    chat_request,
    completion_request,
    event,
    finish_reason,
    json_of,
    model_list,
)
from rollover.types import SamplingParams
from rollover.workflows.conversations import MODEL, Call, Reply, UnknownKey, UnknownModel
from rollover.workflows.protocol import Workflow

KEEP_ALIVE_S = 2.0
"""Seconds between two keep-alive bytes: well below usual read timeouts."""
MAX_BODY_BYTES = 2**24
"""Of a request. Reading a longer one would delay all other calls, and no model reads so much text."""
_ONLY = {"seed": None, "echo": False, "add_generation_prompt": None, "continue_final_message": None}
# A retry may arrive before the server notices that the connection of the first request has ended.
_RETRY_POLL_S, _MAX_RETRY_POLLS = 0.02, 50

ApiRequest = ChatRequest | CompletionRequest
CallHandler = Callable[[str, Call], Awaitable[Reply]]
"""(role, call) -> reply, for the calls of one trajectory. Role "": the trajectory's own."""
Identity = tuple[str, str, str]
"""API key, path and body digest: equal for equal requests."""


class Failed(Refusal):
    """The call failed for an internal reason. A retry does not help."""

    status, code = 500, "internal_error"


@dataclass(eq=False)
class InFlight:
    """A request without a delivered answer. `orphan`: its client has disconnected."""

    identity: Identity
    answer: asyncio.Future[list[Reply]]
    orphan: bool = False


class Gateway:
    """HTTP server for the agents of `workflow`. `app` is its ASGI application.

    `start` serves it on `port` (workflow.port; 0: a free one) and sets `base_url`. Until `close`, NO_PROXY names its
    host, so that the agents' HTTP clients, in this process and in its children, connect without the user's proxy.
    """

    def __init__(
        self,
        workflow: Workflow,
        tokenizer: Any,
        sampling: SamplingParams,
        port: int = 0,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.workflow, self.sampling, self.keep_alive_s, self.base_url = workflow, sampling, keep_alive_s, ""
        self._tokenizer, self._port = tokenizer, port
        self._handlers: dict[str, CallHandler] = {}  # by API key
        self._in_flight: dict[Identity, list[InFlight]] = {}
        self._no_proxy = ExitStack()
        self._server: HttpServer | None = None
        self._client: Any = None
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
            ]
        )

    async def start(self) -> None:
        """Serve. ValueError if the port is taken."""
        self._server = HttpServer(self.workflow.over(self.app), self._port, name="workflow.port")
        await self._server.start()
        self.base_url = f"{self._server.url}/v1"
        self._no_proxy.enter_context(without_proxy(LOOPBACK))
        await self.workflow.start(self.base_url)
        if "client" in self.workflow.wanted:
            import openai

            # One client, so that all trajectories share its pool of connections.
            self._client = openai.AsyncOpenAI(base_url=self.base_url, api_key="none", timeout=None)

    async def close(self) -> None:
        """Close all connections. The workflow has ended before."""
        with self._no_proxy:
            if self._client is not None:
                await self._client.close()
            if self._server is not None:
                await self._server.close()

    def client(self, api_key: str) -> Any:
        """Return an openai.AsyncOpenAI for the trajectory."""
        return self._client.with_options(api_key=api_key)

    def open(self, api_key: str, handler: CallHandler) -> None:
        """Pass calls with this key to `handler` from now on."""
        self._handlers[api_key] = handler

    def revoke(self, api_keys: Iterable[str]) -> set[str]:
        """Cancel the calls of these keys and refuse further ones. Return the ids of the Rollouts that have an answer
        which no client received."""
        keys = {key for key in api_keys if self._handlers.pop(key, None) is not None}
        rollout_ids: set[str] = set()
        for identity in [identity for identity in self._in_flight if identity[0] in keys]:
            for request in self._in_flight.pop(identity):
                if not request.answer.cancel() and request.orphan and request.answer.exception() is None:
                    rollout_ids |= {reply.reply_id.partition("/")[0] for reply in request.answer.result()}
        return rollout_ids

    async def call(self, key: str, model: str, call: Call) -> Reply:
        """Run one turn. UnknownKey, UnknownModel, or a CallRefused of the Episode."""
        return await self._handler(key, model)(model.partition("/")[2], call)

    @property
    def num_in_flight(self) -> int:
        return sum(map(len, self._in_flight.values()))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        return [self._tokenizer.decode([token_id]) for token_id in token_ids]

    def on_disconnect(self, request: InFlight, *, delivered: bool) -> None:
        """Remove a request whose client has the answer; else keep it for a retry."""
        request.orphan = not delivered
        same = self._in_flight.get(request.identity, [])
        if delivered and request in same:  # revoked otherwise
            same.remove(request)
            if not same:
                del self._in_flight[request.identity]

    # Private

    async def _models(self, request: Request) -> Response:
        return JSONResponse(model_list([MODEL]))

    async def _chat(self, request: Request) -> Response:
        return await self._respond(request, self._chat_call)

    async def _completions(self, request: Request) -> Response:
        return await self._respond(request, self._completion_call)

    def _chat_call(self, body: Any) -> tuple[ChatRequest, Call]:
        parsed = chat_request(body, sampling=self.sampling, only=_ONLY, images=True)
        return parsed, Call(
            tuple(parsed.messages),
            tools=tuple(parsed.tools),
            reads_calls=parsed.tool_choice == "auto",
            max_tokens=parsed.most_tokens,
            stop=tuple(parsed.stop),
        )

    def _completion_call(self, body: Any) -> tuple[CompletionRequest, Call]:
        parsed = completion_request(body, sampling=self.sampling, only=_ONLY)
        prompt, *others = parsed.prompts
        if others:
            raise Refusal("prompt: only one at a time is supported here", "prompt", code="unsupported_parameter")
        prompt = prompt if isinstance(prompt, str) else tuple(prompt)
        return parsed, Call(prompt=prompt, max_tokens=parsed.max_tokens, stop=tuple(parsed.stop))

    async def _respond(self, request: Request, parse: Callable[[Any], tuple[ApiRequest, Call]]) -> Response:
        try:
            key = _api_key(request)
            body = await body_of(request, MAX_BODY_BYTES)
            parsed, call = parse(json_of(body, MAX_BODY_BYTES))
            self._handler(key, parsed.model)
        except Refusal as error:
            return _refusal(error)
        assert isinstance(body, bytes)
        identity = (key, request.url.path, hashlib.blake2b(body).hexdigest())
        in_flight = None
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            in_flight = await self._orphan(identity)
        if in_flight is None:
            in_flight = InFlight(identity, asyncio.ensure_future(self._answer(key, parsed, call)))
            in_flight.answer.add_done_callback(_retrieve_error)
            self._in_flight.setdefault(identity, []).append(in_flight)
        return _Delivery(self, in_flight, parsed)

    async def _orphan(self, identity: Identity) -> InFlight | None:
        """Return the orphan that a retry continues; None if no equal request is in flight."""
        for _ in range(_MAX_RETRY_POLLS):
            same = self._in_flight.get(identity, [])
            if orphan := next((request for request in same if request.orphan), None):
                orphan.orphan = False
                return orphan
            if not same:
                break
            await asyncio.sleep(_RETRY_POLL_S)
        return None

    async def _answer(self, key: str, parsed: ApiRequest, call: Call) -> list[Reply]:
        """Return the `n` replies, sampled concurrently."""
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(self._call(key, parsed.model, call)) for _ in range(parsed.n)]
        replies: list[Reply] = []
        for result in (call.result() for call in calls):
            if isinstance(result, Refusal):
                raise result
            replies.append(result)
        return replies

    async def _call(self, key: str, model: str, call: Call) -> Reply | Refusal:
        try:
            return await self.call(key, model, call)
        except Refusal as error:
            return error
        except Exception as error:  # boundary: the client receives it, and the agent decides what it means
            return Failed(f"the call failed: {explained(error)}")

    def _handler(self, key: str, model: str) -> CallHandler:
        if key not in self._handlers:
            raise UnknownKey("no open trajectory has this API key: its episode may have ended")
        name, slash, role = model.partition("/")
        if name != MODEL or (slash and not role):
            raise UnknownModel(f"the model {model!r} is not the run's: ask for {MODEL}, or {MODEL}/ROLE", "model")
        return self._handlers[key]


class _Delivery(Response):
    """The response to a request, sent once it is answered; keep-alive bytes until then."""

    def __init__(self, gateway: Gateway, request: InFlight, parsed: ApiRequest) -> None:
        self.gateway, self.request, self.parsed = gateway, request, parsed
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnected, delivered = asyncio.ensure_future(until_gone(receive)), False
        try:
            has_headers = await self._keep_alive(disconnected, send)
            if not disconnected.done():
                delivered = await self._deliver(scope, receive, send, has_headers)
        finally:
            disconnected.cancel()
            self.gateway.on_disconnect(self.request, delivered=delivered)

    async def _keep_alive(self, disconnected: asyncio.Future[None], send: Send) -> bool:
        """Wait for the answer or a disconnect. Return whether the headers have been sent."""
        has_headers, answer = False, self.request.answer
        while True:
            await asyncio.wait(
                [answer, disconnected], timeout=self.gateway.keep_alive_s, return_when=asyncio.FIRST_COMPLETED
            )
            if answer.done() or disconnected.done():
                return has_headers
            if not has_headers:
                await self._send_headers(send)
            has_headers = True
            filler = b": the call waits for the policy\n\n" if self.parsed.stream else b" "
            await send({"type": "http.response.body", "body": filler, "more_body": True})

    async def _send_headers(self, send: Send) -> None:
        kind = b"text/event-stream" if self.parsed.stream else b"application/json"
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _deliver(self, scope: Scope, receive: Receive, send: Send, has_headers: bool) -> bool:
        """Send the answer. Return whether the client has it: an error after the headers of a response that is no
        stream breaks the connection, and the client's retry gets the error with its status."""
        error = self._error()
        if error is not None and not has_headers:
            await _refusal(error)(scope, receive, send)
            return True
        if error is not None and not self.parsed.stream:
            return False
        if not has_headers:
            await self._send_headers(send)
        if error is not None:
            text = event(error.as_json())
        else:
            replies = self.request.answer.result()
            choices = [_choice(reply) for reply in replies]
            answer = Answer(self.parsed, replies[0].reply_id, choices, self.gateway.token_texts)
            text = "".join(answer.events()) if self.parsed.stream else json.dumps(answer.whole())
        await send({"type": "http.response.body", "body": text.encode(), "more_body": False})
        return True

    def _error(self) -> Refusal | None:
        answer = self.request.answer
        if answer.cancelled():
            return UnknownKey("the episode of this key has ended")
        error = answer.exception()
        return error if error is None or isinstance(error, Refusal) else Failed(f"the call failed: {error}")


def _choice(reply: Reply) -> Choice:
    return Choice(
        reply.prompt_ids,
        reply.text,
        reply.token_ids.tolist(),
        reply.logprobs.tolist(),
        finish_reason(reply.stop_reason),
        reply.message.get("tool_calls", ()),
    )


def _refusal(error: Refusal) -> Response:
    headers = {"x-should-retry": "false"}  # the same request would be refused again
    # json.dumps escapes half a surrogate pair, which the message of an agent's own error may contain.
    body = json.dumps(error.as_json())
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


def _api_key(request: Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not key:
        raise UnknownKey("a request names its trajectory by its API key: Authorization: Bearer KEY")
    return key


def _retrieve_error(answer: asyncio.Future[list[Reply]]) -> None:
    """Keep asyncio from logging an error that no client waits for."""
    _ = answer.cancelled() or answer.exception()


# Proxies

_VARIABLES = ("NO_PROXY", "no_proxy")
_changed: dict[str, tuple[str | None, str]] = {}  # variable -> value before, value that we set
_num_inside = 0  # several gateways may be served at once, and the process has one environment


@contextmanager
def without_proxy(host: str) -> Iterator[None]:
    """Within the context, clients of this process and its children connect to `host` without a proxy.

    The last exit restores the variables, unless other code has changed them meanwhile.
    """
    global _num_inside
    _num_inside += 1
    for name in _VARIABLES:
        before = os.environ.get(name)
        hosts = [known for known in (before or "").split(",") if known]
        if host not in hosts:
            os.environ[name] = ",".join([*hosts, host])
            _changed[name] = before, os.environ[name]
    try:
        yield
    finally:
        _num_inside -= 1
        if not _num_inside:
            _restore_variables()


def _restore_variables() -> None:
    for name, (before, ours) in _changed.items():
        if os.environ.get(name) != ours:
            continue
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    _changed.clear()
