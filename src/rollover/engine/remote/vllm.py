"""Dialect of vLLM's server and of `rollover serve`: their paths, bodies, events and pitfalls.

tokens    POST /inference/v1/generate ──"data: {...}" events──parse_event──▶ Chunk
weights   verify ─▶ pause(keep) ─▶ start ─▶ update ─▶ finish(label) ─▶ resume
                                      └ refused: no finish; resume under the old ones
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import json
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from rollover.engine.protocol import EngineDied
from rollover.engine.remote.client import ServerClient, ServerFailed, ServerRefused
from rollover.engine.remote.dialect import Chunk, GenerateRequest, ServerDialect, ShownPrompt, Span
from rollover.images import read_unchanged
from rollover.types import Media

_GENERATE = "/inference/v1/generate"
_WEIGHTS = "/weight_info"  # not /health, which is answered while the engine behind it hangs
_MODELS = "/v1/models"
_ABORT_PREFIX = "generate-tokens-"  # for the bare id it answers "aborted", and continues
_NOT_THERE = (403, 404, 405, 501)  # 403 for features that are off, in earlier versions 404
_NEEDS = {_GENERATE: "--enable-scale-out", _WEIGHTS: "VLLM_SERVER_DEV_MODE=1"}
# A model of text; --limit-mm-per-prompt; of this package in either server.
_NO_IMAGES = re.compile("is not a multimodal model|At most 0 image|takes text alone")
_LEAST_BIAS = -100.0  # vLLM's limit: a factor of e^-100 is below the smallest float32
_VERIFY = "rollover_verify"
_LEFT_OPEN = "left open"
_LOOK_AGAIN_S = 0.05
_FINISHES_S = 3.0
_KEPT_URLS = 32  # a group's rollouts show the same image, and a resumed one shows it again


class VllmDialect(ServerDialect):
    """Dialect of vLLM's server and of `rollover serve`."""

    takes_images = processes_logits = keeps_requests = True

    # Tokens

    def encode_images(self, media: Sequence[Media]) -> Sequence[Mapping[str, Any]]:
        return content_parts(media)

    async def generate(self, client: ServerClient, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        try:
            async with contextlib.aclosing(client.events(_GENERATE, request_body(request))) as events:
                async for data in events:
                    if (chunk := parse_event(data)) is None:
                        return
                    yield chunk
        except ValueError as error:
            if request.images and takes_no_images(str(error)):
                raise EngineDied(f"prompts show images, and a server takes none: {error}") from error
            raise

    async def abort(self, client: ServerClient, request_id: str, limit_s: float) -> None:
        await client.post("/abort_requests", {"request_ids": [_ABORT_PREFIX + request_id]}, limit_s=limit_s)

    # State

    async def check(self, client: ServerClient, limit_s: float) -> None:
        await self.weights_label(client, limit_s)
        try:
            await client.post(_GENERATE, {}, limit_s=limit_s)  # an invalid body, which no server executes
        except ServerRefused as error:
            if (why := _lacking(_GENERATE, error)) is not None:
                raise ServerFailed(why) from error

    async def longest_rollout(self, client: ServerClient, limit_s: float) -> int | None:
        models = await client.get_object(_MODELS, limit_s=limit_s)
        with contextlib.suppress(LookupError, TypeError):
            if type(longest := models["data"][0]["max_model_len"]) is int:
                return longest
        return None

    async def weights_label(self, client: ServerClient, limit_s: float) -> str:
        try:
            return str((await client.get_object(_WEIGHTS, limit_s=limit_s)).get("weight_version"))
        except ServerRefused as error:
            raise ServerFailed(_lacking(_WEIGHTS, error) or str(error)) from error

    # Weights

    async def verify_weights(self, client: ServerClient, weights: Mapping[str, Any], limit_s: float) -> None:
        """Verify ahead if the server supports it; others verify when they load."""
        body = {"method": _VERIFY, "args": [weights["path"], weights["sha256"]]}
        deadline = time.monotonic() + limit_s
        while True:
            try:
                answer = await client.post("/collective_rpc", body, limit_s=limit_s)
            except ServerRefused:
                return
            results = answer.get("results", []) if isinstance(answer, dict) else []
            for said in results:
                if isinstance(said, str) and said.startswith("refused"):
                    raise ServerRefused(f"it cannot use the weights in {weights['path']}: {said}")
            if "verifying" not in results or time.monotonic() > deadline:
                return
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def pause(self, client: ServerClient, *, clear_cache: bool, limit_s: float) -> None:
        await client.post("/pause", limit_s=limit_s, mode="keep", clear_cache=str(clear_cache).lower())

    async def load_weights(
        self, client: ServerClient, weights: Mapping[str, Any], label: str, *, clear_cache: bool, limit_s: float
    ) -> None:
        left_open = await self._start_update(client, limit_s)
        info = {"path": weights["path"], "sha256": weights["sha256"]}
        try:
            await client.post("/update_weights", {"update_info": info}, limit_s=limit_s)
        except ServerRefused as error:
            if left_open:  # its weights are unknown
                raise ServerFailed(str(error)) from error
            raise
        try:
            await client.post("/finish_weight_update", {"weight_version": label}, limit_s=limit_s)
        except ServerRefused as error:
            raise ServerFailed(str(error)) from error

    async def _start_update(self, client: ServerClient, limit_s: float) -> bool:
        """Begin an update. Returns whether one of a killed client was still open.

        That one is finished first, under a label of no run, as the server's weights are unknown. A live client finishes
        its own within _FINISHES_S.
        """
        deadline = time.monotonic() + _FINISHES_S
        while True:
            try:
                await client.post("/start_weight_update", limit_s=limit_s)
                return False
            except ServerRefused as error:
                refusal = error
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        try:
            await client.post("/finish_weight_update", {"weight_version": _LEFT_OPEN}, limit_s=limit_s)
        except ServerRefused:  # none was open
            raise refusal from None
        try:
            await client.post("/start_weight_update", limit_s=limit_s)
        except ServerRefused as error:
            raise ServerFailed(str(error)) from error
        return True

    async def resume(self, client: ServerClient, limit_s: float) -> None:
        await client.post("/resume", limit_s=limit_s)

    async def sleep(self, client: ServerClient, limit_s: float) -> None:
        await client.post("/sleep", limit_s=limit_s, level="2")

    async def wake(self, client: ServerClient, tags: str, limit_s: float) -> None:
        await client.post("/wake_up", limit_s=limit_s, tags=tags)


def _lacking(path: str, error: ServerRefused) -> str | None:
    """Return the message for a server that lacks `path`; None if it has it."""
    if error.status in _NOT_THERE:
        return (
            f"it does not have {path} ({error}): a server of vLLM has it with {_NEEDS[path]}, as `rollover serve"
            " --engine vllm` starts it"
        )
    return None


def takes_no_images(refusal: str) -> bool:
    """Return whether a server refused images because its model or its command line takes none."""
    return _NO_IMAGES.search(refusal) is not None


# Requests


def request_body(request: GenerateRequest) -> dict[str, Any]:
    """Return the body of a request, without stop strings: the server does not see the whole turn."""
    sampling = request.extend.sampling
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": list(request.token_ids),
        "stream": True,
        "stream_options": {"include_usage": True},
        "sampling_params": {
            "max_tokens": request.max_tokens,  # without it a server would give 16
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": request.seed,
            "logprobs": 0,
            "ignore_eos": True,  # the stop tokens are those of the request
            "stop_token_ids": sorted(request.extend.stop.token_ids),
            **_processing(request),
        },
    }
    if request.images:
        salt, images = request.image_salt, request.images
        named = images if salt is None else [{**part, "uuid": f"{part['digest']}/{salt}"} for part in images]
        body |= {"content_parts": list(named), "return_token_ids": True}
    return body if request.cache_salt is None else body | {"cache_salt": request.cache_salt}


def _processing(request: GenerateRequest) -> dict[str, Any]:
    """Return the parameters of logits processing: all that config/logits.py permits for servers."""
    options, out = request.extend.processing, {}
    num_answer = request.num_generated - request.extend.text_start
    if options.repetition_penalty != 1:  # over all tokens that the server gets: prompt and answer
        out["repetition_penalty"] = options.repetition_penalty
    if options.min_new_tokens > num_answer:
        out["min_tokens"] = min(options.min_new_tokens - num_answer, request.max_tokens)  # vLLM refuses more
    if options.logit_bias:
        out["logit_bias"] = {str(token): max(bias, _LEAST_BIAS) for token, bias in options.logit_bias}
    return out


def content_parts(media: Sequence[Media]) -> list[dict[str, Any]]:
    """Return the `content_parts` of a request, in the order of the prompt. Raises ValueError if an image has changed.

    vLLM reads type and url; `rollover serve --engine embedded` also the fields of Media. The source, a local path, is
    not sent.
    """
    parts = []
    for image in sorted(media, key=lambda image: image.offset):
        url = _data_url(image.source, image.digest)
        parts.append({"type": "image_url"} | image.to_json() | {"url": url})
        del parts[-1]["source"]
    return parts


@functools.lru_cache(maxsize=_KEPT_URLS)
def _data_url(source: str, digest: str) -> str:
    """Return the image as a lossless PNG in a data URL."""
    out = io.BytesIO()
    read_unchanged(source, digest).save(out, format="PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


# Events


def parse_event(data: str) -> Chunk | None:
    """Parse the text after "data:"; None at the end of a stream.

    Raises ServerFailed for an error or an invalid chunk, ValueError for an error of code 400 (invalid for any server).
    """
    if data == "[DONE]":
        return None
    try:
        event = json.loads(data)
        error = event.get("error")
    except (ValueError, AttributeError, RecursionError) as failure:
        raise ServerFailed(f"it sent an event that is not a JSON object: {data[:200]}") from failure
    if error is not None:
        said, code = (error.get("message", error), error.get("code")) if isinstance(error, dict) else (error, None)
        raise ValueError(str(said)) if code == 400 else ServerFailed(f"it failed: {said}")
    try:
        if not event["choices"]:
            usage = event.get("usage") or {}
            return Chunk(cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        return _chunk(event["choices"][0], _shown(event))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as failure:
        raise ServerFailed(f"it sent an invalid chunk of tokens ({failure!r}): {data[:200]}") from failure


def _chunk(choice: dict[str, Any], shown: ShownPrompt | None) -> Chunk:
    content = (choice.get("logprobs") or {}).get("content") or ()
    spans = choice.get("weight_versions")
    return Chunk(
        tuple(choice["token_ids"] or ()),
        tuple(entry["logprob"] for entry in content),
        choice.get("finish_reason"),
        None if spans is None else tuple(Span(str(of["version"]), of["start"], of["end"]) for of in spans),
        shown=shown,
    )


def _shown(event: dict[str, Any]) -> ShownPrompt | None:
    if event.get("prompt_token_ids") is None:
        return None
    ranges = (event.get("mm_placeholders") or {}).get("image") or ()
    images = tuple((of["offset"], of["offset"] + of["length"]) for of in ranges)
    return ShownPrompt(tuple(event["prompt_token_ids"]), images)
