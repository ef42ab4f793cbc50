"""`rollover serve --engine embedded`: the endpoints of vLLM's server over a `Service`, in this process.

    POST /inference/v1/generate            token ids in and out, streamed or not
    POST /abort_requests                   also /inference/v1/abort_requests
    POST /pause  /resume                   GET /is_paused
    POST /sleep  /wake_up                  GET /is_sleeping
    POST /start_weight_update  /update_weights  /finish_weight_update  /update_weight_version
    POST /collective_rpc                   rollover_verify alone: a weights file is read ahead
    POST /reset_prefix_cache
    POST /v1/completions  /v1/chat/completions        texts in and out (texts.py)
    GET  /weight_info  /health  /load  /metrics  /version  /v1/models  /get_world_size

Owns the process until SIGTERM or Ctrl-C, the connections, and the JSON of responses. Errors have vLLM's form
{"error": {"message", "code", "param"}}.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import rollover
from rollover.config import Config
from rollover.engine.server.requests import GenerateBody, choice, flag, text_field
from rollover.engine.server.service import TAGS, RequestStream, Service, TokenChunk
from rollover.engine.server.texts import AbortedWithClient, TextEndpoints
from rollover.http_guard import token
from rollover.http_server import HttpServer, body_of, end_of_service
from rollover.models.devices import dtype_of, engine_device
from rollover.models.load import load_model
from rollover.models.threads import prepare_process
from rollover.openai_wire import DONE, Refusal, checked, event, finite, json_of, model_list, usage

MOST_BODY_BYTES = 2**26
_LAST_CHUNKS_S = 1.0
_Answer = Callable[[Request], Awaitable[Response]]


def make_app(service: Service, texts: TextEndpoints | None = None) -> Starlette:
    """Return the ASGI application, which HttpServer guards by a token. `texts`: for the text endpoints."""
    endpoints = _Endpoints(service, texts)
    posts, gets = endpoints.posts(), endpoints.gets()
    return Starlette(
        routes=[
            *(Route(path, answer, methods=["POST"]) for path, answer in posts.items()),
            *(Route(path, answer, methods=["GET"]) for path, answer in gets.items()),
        ],
        exception_handlers={Refusal: _refused},
    )


class _Endpoints:
    def __init__(self, service: Service, texts: TextEndpoints | None) -> None:
        self.service, self.texts = service, texts

    def posts(self) -> dict[str, _Answer]:
        return {
            "/inference/v1/generate": self._generate,
            "/abort_requests": self._abort,
            "/inference/v1/abort_requests": self._abort,
            "/pause": self._pause,
            "/resume": self._resume,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
            "/start_weight_update": self._start_update,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish_update,
            "/update_weight_version": self._update_version,
            "/collective_rpc": self._collective_rpc,
            "/reset_prefix_cache": self._reset_prefix_cache,
            **(
                {}
                if self.texts is None
                else {
                    "/v1/completions": _of_json(self.texts.completions),
                    "/v1/chat/completions": _of_json(self.texts.chat),
                }
            ),
        }

    def gets(self) -> dict[str, _Answer]:
        return {
            "/is_paused": _always(lambda: {"is_paused": self.service.is_paused}),
            "/is_sleeping": _always(lambda: {"is_sleeping": bool(self.service.asleep)}),
            "/weight_info": _always(lambda: {"weight_version": self.service.label}),
            "/health": _always(dict),
            "/load": _always(lambda: {"server_load": len(self.service.streams)}),
            "/version": _always(lambda: {"version": rollover.__version__, "engine": "rollover"}),
            "/get_world_size": _always(lambda: {"world_size": 1}),
            "/v1/models": _always(self._model_list),
            "/metrics": self._metrics,
        }

    async def _generate(self, request: Request) -> Response:
        body = checked(GenerateBody, await _json(request))
        stream = await self.service.generate(body)
        if body.stream:
            return _StreamedAnswer(self.service, stream)
        return AbortedWithClient(self.service, [stream], partial(_whole, self.service, stream))

    async def _abort(self, request: Request) -> Response:
        body = await _object(request)
        ids = body.get("request_ids") or []
        if not isinstance(ids, list) or not all(isinstance(full_id, str) for full_id in ids):
            raise Refusal("request_ids: a list of texts is wanted", "request_ids")
        if ids:
            self.service.abort_ids(ids)
        num = len(ids) or self.service.abort_all()  # unknown ids count, as in vLLM
        return JSONResponse({"status": "aborted", "aborted": num})

    async def _pause(self, request: Request) -> Response:
        query = request.query_params
        mode = choice(query.get("mode"), "mode", "abort", ("abort", "wait", "keep"))
        await self.service.pause(mode, clear_cache=flag(query.get("clear_cache"), "clear_cache", default=True))
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        self.service.resume()
        return JSONResponse({"status": "resumed"})

    async def _sleep(self, request: Request) -> Response:
        level = choice(request.query_params.get("level"), "level", "1", ("1", "2"))
        await self.service.sleep(int(level))
        return Response()

    async def _wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or TAGS
        self.service.wake_up([choice(tag, "tags", "", TAGS) for tag in tags])
        return Response()

    async def _start_update(self, request: Request) -> Response:
        self.service.start_update()
        return JSONResponse({"message": "Weight update started"})

    async def _update(self, request: Request) -> Response:
        info = (await _object(request)).get("update_info")
        if not isinstance(info, dict):
            raise Refusal("update_info: an object with path and sha256 is wanted", "update_info")
        await self.service.update(text_field(info, "path"), text_field(info, "sha256"))
        return JSONResponse({"message": "Weights updated"})

    async def _finish_update(self, request: Request) -> Response:
        body = await _object(request, may_be_empty=True)
        label = None if body.get("weight_version") is None else text_field(body, "weight_version")
        self.service.finish_update(label)
        return JSONResponse({"message": "Weight update finished"})

    async def _update_version(self, request: Request) -> Response:
        self.service.label = text_field(await _object(request), "new_version")
        return JSONResponse({"success": True, "new_version": self.service.label})

    async def _collective_rpc(self, request: Request) -> Response:
        body = await _object(request)
        method, args = body.get("method"), body.get("args")
        if method != "rollover_verify":
            raise Refusal(f"method: there is none called {method!r}, but rollover_verify", "method")
        if not isinstance(args, list) or len(args) != 2 or not all(isinstance(arg, str) for arg in args):
            raise Refusal("args: the file's path and its SHA-256 are wanted", "args")
        return JSONResponse({"results": [self.service.verifier.status(*args)]})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        name = "reset_running_requests"
        of_running = flag(request.query_params.get(name), name, default=False)
        return JSONResponse({"success": self.service.drop_kv(of_running=of_running)})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(await _metrics_text(self.service), media_type="text/plain; version=0.0.4")

    def _model_list(self) -> dict[str, Any]:
        return model_list([self.service.model_name], max_model_len=self.service.engine.max_tokens)


class _StreamedAnswer(AbortedWithClient):
    """Response of server-sent events: a chunk per token, then [DONE]."""

    def __init__(self, service: Service, stream: RequestStream) -> None:
        super().__init__(service, [stream], partial(_whole, service, stream))
        self.stream = stream

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            prompt = _prompt(self.stream)
            async for chunks in self.stream.chunks():
                first = self._event([_choice(chunks[0], self.stream)], **prompt)
                rest = "".join(self._event([_choice(chunk, self.stream)]) for chunk in chunks[1:])
                body, prompt = first + rest, {}
                await send({"type": "http.response.body", "body": body.encode(), "more_body": True})
            options, last = self.stream.body.stream_options, ""
            if options is not None and options.include_usage:
                last = self._event([], usage=_usage(self.stream))
        except Refusal as error:
            last = event(error.as_json())
        await send({"type": "http.response.body", "body": (last + DONE).encode(), "more_body": False})

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return event({"request_id": self.stream.full_id, "choices": choices, **more})


async def _whole(service: Service, stream: RequestStream) -> Response:
    whole = {
        "request_id": stream.full_id,
        "model": service.model_name,
        "choices": [_choice(await stream.joined(), stream)],
        "usage": _usage(stream),
        **_prompt(stream),
    }
    return JSONResponse(whole)


def _choice(chunk: TokenChunk, stream: RequestStream) -> dict[str, Any]:
    logprobs = None
    if stream.body.sampling_params.logprobs is not None:
        pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
        logprobs = {"content": [{"token_id": token, "logprob": finite(logprob)} for token, logprob in pairs]}
    return {
        "index": 0,
        "token_ids": chunk.token_ids,
        "logprobs": logprobs,
        "finish_reason": chunk.finish_reason,
        "stop_reason": chunk.stop_reason,
        "weight_versions": chunk.weight_versions,
    }


def _prompt(stream: RequestStream) -> dict[str, Any]:
    """Return the prompt's ids and the places of its images, if the client wants them."""
    body = stream.body
    if not body.return_token_ids:
        return {}
    images = [{"offset": part.offset, "length": part.count} for part in body.content_parts or ()]
    return {"prompt_token_ids": body.token_ids} | ({"mm_placeholders": {"image": images}} if images else {})


def _usage(stream: RequestStream) -> dict[str, int]:
    return usage(len(stream.body.token_ids), stream.num_tokens)


async def _metrics_text(service: Service) -> str:
    """Return metrics in Prometheus' format: those that vLLM's dashboards read, and our own counters."""
    in_flight = list(service.streams)
    waiting = len(await service.engine.queued(in_flight))
    stats = service.engine.stats()
    num_generated = service.num_ended_tokens + sum(s.num_tokens for s in service.streams.values())
    lines = [
        *_metric("vllm:num_requests_running", "gauge", len(in_flight) - waiting, service),
        *_metric("vllm:num_requests_waiting", "gauge", waiting, service),
        *_metric("vllm:generation_tokens_total", "counter", num_generated, service),
        *_metric("vllm:prompt_tokens_total", "counter", service.num_prompt_tokens, service),
        *_metric("vllm:num_preemptions_total", "counter", stats["engine/preemptions"], service),
        *_metric("rollover:weight_updates_total", "counter", service.num_updates, service),
    ]
    for key, value in sorted(stats.items()):
        lines += _metric(f"rollover:{key.replace('/', '_')}", "untyped", value, service)
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, value: float, service: Service) -> list[str]:
    model = service.model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return [f"# TYPE {name} {kind}", f'{name}{{model_name="{model}"}} {float(value):.17g}']


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return JSONResponse(error.as_json(), status_code=error.status)


def _of_json(answer: Callable[[Any], Awaitable[Response]]) -> _Answer:
    async def answer_json(request: Request) -> Response:
        return await answer(await _json(request))

    return answer_json


def _always(value: Callable[[], dict[str, Any]]) -> _Answer:
    async def answer(request: Request) -> Response:
        return JSONResponse(value())

    return answer


async def _json(request: Request) -> Any:
    return json_of(await body_of(request, MOST_BODY_BYTES), MOST_BODY_BYTES)


async def _object(request: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
    body = await body_of(request, MOST_BODY_BYTES)
    if may_be_empty and not body:
        return {}
    value = json_of(body, MOST_BODY_BYTES)
    if not isinstance(value, dict):
        raise Refusal("body: a JSON object is wanted", "body")
    return value


async def serve(config: Config, host: str, port: int, ready: Callable[[str], None]) -> int:
    """Serve until SIGTERM (returns 0) or Ctrl-C (130). `ready` is called with the URL when the server answers.

    Raises ValueError if the port is taken, or the model cannot be loaded.
    """
    parts: list[Starlette] = []  # set when the model is loaded

    async def app(scope, receive, send) -> None:
        await parts[0](scope, receive, send)

    server = HttpServer(app, port, host, "--port", token=token())  # first, so that a taken port fails at once
    service = make_service(config)
    parts.append(make_app(service, TextEndpoints(service, service.tokenizer)))
    ended = end_of_service()
    await server.start()
    ready(server.url)
    code = await ended
    service.abort_all()
    await server.close(_LAST_CHUNKS_S)
    await service.engine.close()
    return code


def make_service(config: Config) -> Service:
    """Return a service of the configuration's model."""
    prepare_process(config)
    return Service(load_model(config.model, dtype=dtype_of(config), device=engine_device(config)), config)
