"""The gateway: an HTTP server of the OpenAI API for the agents of a run's workflows, on this machine alone.

    GET  /v1/models
    POST /v1/chat/completions     stream or not
    POST /v1/completions          a text or token ids

The API key names the trajectory. While a call waits for the policy, through new weights and other rollouts' turns, its
connection is kept alive: by white space before the JSON, or by comments in a stream. The headers go out with the first
such byte, so that what is refused at once has its own status.

A client that waits too long closes its connection and asks again. What was sampled for it meanwhile is the answer to
its retry: were it asked anew, tokens would be sampled twice, and one of the two turns would belong to nobody.

    ask ──▶ under way ──answered──▶ delivered                        (forgotten)
                 └──connection gone──▶ orphan ──equal retry──▶ under way again

Owns the connections. What a call is worth, and which Rollout it belongs to, is the Caller's business.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollover.functions import explained
from rollover.http_server import body_of, until_gone
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
from rollover.workflows.calls import Call, Caller, Reply, UnknownKey

KEEP_ALIVE_S = 2.0
"""Between two signs of life: well below the read time-outs that people set."""
MOST_BODY_BYTES = 2**24
"""Of a request: what is longer is no text that a model reads, and to read it would hold every other call up."""
_ONLY = {"seed": None, "echo": False, "add_generation_prompt": None, "continue_final_message": None}

Asked = ChatRequest | CompletionRequest
Answering = asyncio.Future[list[Reply]]
_LOOK_S, _MOST_LOOKS = 0.02, 50  # a retry may come before the end of the connection that it replaces is seen


class Failed(Refusal):
    """The call failed for a reason of ours. Asking again is of no use."""

    status, code = 500, "internal_error"


@dataclass(eq=False)
class Question:
    """One request. `answering` goes on when its client has gone."""

    identity: Hashable
    answering: Answering
    orphan: bool = field(default=False)


class Questions:
    """Of one gateway. `identity` is equal for equal requests: the key, the path and the body."""

    def __init__(self) -> None:
        self._open: dict[Hashable, list[Question]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    async def ask(self, identity: Hashable, is_retry: bool, answer: Callable[[], Awaitable[list[Reply]]]) -> Question:
        """The question that a retry joins, or a new one, to which `answer` gives the answer."""
        for _ in range(_MOST_LOOKS if is_retry else 0):
            equal = self._open.get(identity, [])
            if orphan := next((question for question in equal if question.orphan), None):
                orphan.orphan = False
                return orphan
            if not equal:
                break
            await asyncio.sleep(_LOOK_S)
        question = Question(identity, asyncio.ensure_future(answer()))
        question.answering.add_done_callback(_seen)
        self._open.setdefault(identity, []).append(question)
        return question

    def on_gone(self, question: Question) -> None:
        """Its client went away before it had the answer."""
        question.orphan = True

    def on_delivered(self, question: Question) -> None:
        """Its client has the answer."""
        equal = self._open.get(question.identity, [])
        if question in equal:  # else it was forgotten
            equal.remove(question)
        if not equal:
            self._open.pop(question.identity, None)

    def forget(self, of: Callable[[Hashable], bool]) -> list[Reply]:
        """Cancel those whose identity `of` picks: nobody will ask for them again. Returns the answers that were there
        and reached no client."""
        replies: list[Reply] = []
        for identity in [identity for identity in self._open if of(identity)]:
            for question in self._open.pop(identity):
                if not question.answering.cancel() and question.orphan and question.answering.exception() is None:
                    replies += question.answering.result()
        return replies


class Gateway:
    """`app` is the ASGI application over `caller`."""

    def __init__(self, caller: Caller, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self.caller, self.keep_alive_s, self.questions = caller, keep_alive_s, Questions()
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
            ]
        )

    def forget(self, key: str) -> list[Reply]:
        """The trajectory `key` is closed: its calls are given up. Returns the answers that reached no client."""
        return self.questions.forget(lambda identity: isinstance(identity, tuple) and identity[0] == key)

    # Private

    async def _models(self, request: Request) -> Response:
        return JSONResponse(model_list(self.caller.models()))

    async def _chat(self, request: Request) -> Response:
        return await self._respond(request, self._chat_call)

    async def _completions(self, request: Request) -> Response:
        return await self._respond(request, self._completion_call)

    def _chat_call(self, body: Any) -> tuple[ChatRequest, Call]:
        asked = chat_request(body, sampling=self.caller.sampling, only=_ONLY, images=True)
        reads_calls = asked.tool_choice == "auto"
        return asked, Call(
            tuple(asked.messages),
            tools=tuple(asked.tools),
            reads_calls=reads_calls,
            max_tokens=asked.most_tokens,
            stop=tuple(asked.stop),
        )

    def _completion_call(self, body: Any) -> tuple[CompletionRequest, Call]:
        asked = completion_request(body, sampling=self.caller.sampling, only=_ONLY)
        prompt, *others = asked.prompts
        if others:
            raise Refusal("prompt: only one at a time is supported here", "prompt", code="unsupported_parameter")
        prompt = prompt if isinstance(prompt, str) else tuple(prompt)
        return asked, Call(prompt=prompt, max_tokens=asked.max_tokens, stop=tuple(asked.stop))

    async def _respond(self, request: Request, read: Callable[[Any], tuple[Asked, Call]]) -> Response:
        try:
            key = _key(request)
            body = await body_of(request, MOST_BODY_BYTES)
            asked, call = read(json_of(body, MOST_BODY_BYTES))
            self.caller.find(key, asked.model)
        except Refusal as error:
            return _refusal(error)
        assert isinstance(body, bytes)
        identity = (key, request.url.path, hashlib.blake2b(body).hexdigest())
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        question = await self.questions.ask(identity, is_retry, lambda: self._answer(key, asked, call))
        return _Delivery(self, question, asked)

    async def _answer(self, key: str, asked: Asked, call: Call) -> list[Reply]:
        """All `n` of them are asked for at once."""
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(self._call(key, asked.model, call)) for _ in range(asked.n)]
        if refused := next((r for r in (call.result() for call in calls) if isinstance(r, Refusal)), None):
            raise refused
        return [reply for call in calls if isinstance(reply := call.result(), Reply)]

    async def _call(self, key: str, model: str, call: Call) -> Reply | Refusal:
        try:
            return await self.caller.call(key, model, call)
        except Refusal as error:
            return error
        except Exception as error:  # boundary: the client is told, and what the agent makes of that is seen
            return Failed(f"the call failed: {explained(error)}")


class _Delivery(Response):
    """The answer to a question, sent when it is there; signs of life until then."""

    def __init__(self, gateway: Gateway, question: Question, asked: Asked) -> None:
        self.gateway, self.question, self.asked = gateway, question, asked
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone, delivered = asyncio.ensure_future(until_gone(receive)), False
        try:
            begun = await self._keep_alive(gone, send)
            if not gone.done():
                delivered = await self._deliver(scope, receive, send, begun)
        finally:
            gone.cancel()
            questions = self.gateway.questions
            (questions.on_delivered if delivered else questions.on_gone)(self.question)

    async def _keep_alive(self, gone: asyncio.Future[None], send: Send) -> bool:
        """Wait for the answer, or for the end of the connection. Whether the headers have gone out."""
        begun, answering = False, self.question.answering
        while True:
            await asyncio.wait(
                [answering, gone], timeout=self.gateway.keep_alive_s, return_when=asyncio.FIRST_COMPLETED
            )
            if answering.done() or gone.done():
                return begun
            if not begun:
                await self._begin(send)
            begun = True
            sign = b": the call waits for the policy\n\n" if self.asked.stream else b" "
            await send({"type": "http.response.body", "body": sign, "more_body": True})

    async def _begin(self, send: Send) -> None:
        kind = b"text/event-stream" if self.asked.stream else b"application/json"
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _deliver(self, scope: Scope, receive: Receive, send: Send, begun: bool) -> bool:
        """Send the answer. Whether the client has it: an error after the headers breaks off an answer that is no
        stream, and its client's retry gets the error with its status."""
        error = self._error()
        if error is not None and not begun:
            await _refusal(error)(scope, receive, send)
            return True
        if error is not None and not self.asked.stream:
            return False
        if not begun:
            await self._begin(send)
        if error is not None:
            text = event(error.as_json())
        else:
            replies = self.question.answering.result()
            choices = [_choice(reply) for reply in replies]
            answer = Answer(self.asked, replies[0].reply_id, choices, self.gateway.caller.token_texts)
            text = "".join(answer.events()) if self.asked.stream else json.dumps(answer.whole())
        await send({"type": "http.response.body", "body": text.encode(), "more_body": False})
        return True

    def _error(self) -> Refusal | None:
        answering = self.question.answering
        if answering.cancelled():
            return UnknownKey("the episode of this key has ended")
        error = answering.exception()
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
    # By json.dumps: what an agent's code raised may have half a character, which it escapes.
    body = json.dumps(error.as_json())
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


def _key(request: Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not key:
        raise UnknownKey("a request names its trajectory by its API key: Authorization: Bearer KEY")
    return key


def _seen(answering: Answering) -> None:
    """Its client may be gone, and asyncio need not complain about an error then."""
    _ = answering.cancelled() or answering.exception()
