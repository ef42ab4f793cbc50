"""The OpenAI API's text endpoints of a served engine, for benchmarks and other programs without token ids.

    POST /v1/completions         texts or token ids, several at once; echo with logprobs: of the prompt's tokens, too
    POST /v1/chat/completions    messages, by the model's chat template

Maps requests to those of the Service; openai_wire.py has the bodies and responses. Log-probs of an answer's tokens are
of the sampled distribution (0 at temperature 0), those of a prompt's tokens at temperature 1. Sampling parameters are
those of the request, not of [rollout]. A stream is sent in one piece.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jinja2 import TemplateError
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from rollover.engine.protocol import before_stop
from rollover.engine.server.requests import GenerateBody, SamplingFields
from rollover.engine.server.service import RequestStream, Service, TokenChunk
from rollover.http_server import until_gone
from rollover.models.chat_template import prompt_arguments
from rollover.openai_wire import (
    Answer,
    ChatRequest,
    Choice,
    CompletionRequest,
    Logprobs,
    Refusal,
    chat_request,
    completion_request,
)

_MAX_ANSWERS = 4096  # of one request, so that it does not delay others for hours
_COMPLETION_TOKENS = 16  # default of max_tokens for completions
_ONLY = {"tools": []}  # tool calls are not parsed here


class TextEndpoints:
    """The two text endpoints over `service`. `tokenizer`: the model's."""

    def __init__(self, service: Service, tokenizer: Any) -> None:
        self.service, self.tokenizer = service, tokenizer

    async def completions(self, value: Any) -> Response:
        """Answer /v1/completions."""
        body = completion_request(value, only=_ONLY)
        self.service.check_model(body.model)
        if (num := len(body.prompts) * body.n) > _MAX_ANSWERS:
            raise Refusal(f"prompt: {num:,} answers requested, above the limit of {_MAX_ANSWERS:,}", "prompt")
        prompts = [self._ids(prompt) for prompt in body.prompts]
        echoed = [self._echoed(body, ids) for ids in prompts]
        limit = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return await self._answer(body, prompts, limit, echoed)

    async def chat(self, value: Any) -> Response:
        """Answer /v1/chat/completions. Continues a last assistant message unless add_generation_prompt is set."""
        body = chat_request(value, only=_ONLY, images=False)
        self.service.check_model(body.model)
        return await self._answer(body, [self._chat_ids(body)], body.most_tokens, [("", Logprobs())])

    # Private

    def _ids(self, prompt: str | list[int]) -> list[int]:
        ids = list(self.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else prompt
        if not ids:
            raise Refusal("prompt: one of them has no token", "prompt")
        return ids

    def _chat_ids(self, body: ChatRequest) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise Refusal("messages: the model has no chat template; use /v1/completions", "messages")
        messages, options = prompt_arguments(body.messages)
        if body.add_generation_prompt:
            messages, options = body.messages, {"add_generation_prompt": True}
        if body.continue_final_message and not options.get("continue_final_message"):
            raise Refusal(
                "continue_final_message: the last message is no answer that was begun: it must be of the role"
                " assistant, with a content, and add_generation_prompt not set",
                "continue_final_message",
            )
        try:
            return list(self.tokenizer.apply_chat_template(messages, **options, tokenize=True, return_dict=False))
        except (TemplateError, TypeError, KeyError, ValueError, RecursionError) as error:
            raise Refusal(f"messages: the model's chat template refuses them: {error}", "messages") from error

    async def _answer(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        max_tokens: int | None,
        echoed: list[tuple[str, Logprobs]],
    ) -> Response:
        """Return `n` answers to each prompt, in order. `echoed`: echoed text and log-probs of each prompt."""
        streams: list[RequestStream] = []
        try:
            for ids in prompts if max_tokens != 0 else ():
                for number in range(body.n):
                    streams.append(await self.service.generate(_generate(body, ids, number, max_tokens)))
        except BaseException:
            for stream in streams:
                self.service.abort(stream)
            raise

        async def whole() -> Response:
            chunks = [await stream.joined() for stream in streams] or [TokenChunk([], [], "length")] * len(
                prompts
            ) * body.n
            choices = []
            for index, chunk in enumerate(chunks):
                before, of_prompt = echoed[index // body.n]
                choices.append(
                    Choice(
                        prompts[index // body.n],
                        before
                        + before_stop(self.tokenizer.decode(chunk.token_ids, skip_special_tokens=True), body.stop),
                        chunk.token_ids,
                        chunk.logprobs,
                        chunk.finish_reason or "stop",
                        of_prompt=of_prompt,
                    )
                )
            answer = Answer(body, uuid.uuid4().hex, choices, self._texts)
            if body.stream:
                return Response("".join(answer.events()), media_type="text/event-stream")
            return JSONResponse(answer.whole())

        return AbortedWithClient(self.service, streams, whole)

    def _echoed(self, body: CompletionRequest, ids: list[int]) -> tuple[str, Logprobs]:
        if not body.echo:
            return "", Logprobs()
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text, Logprobs() if body.logprobs is None else self._prompt_logprobs(ids)

    def _prompt_logprobs(self, ids: list[int]) -> Logprobs:
        """Return the prompt's log-probs, with the likeliest token at each place. The first token has none."""
        try:
            values, likeliest, best = self.service.engine.prompt_logprobs(ids)
        except (ValueError, IndexError, OverflowError) as error:
            raise Refusal(str(error), "prompt") from error
        texts = self._texts(ids)
        pairs = zip(texts[1:], values, self._texts(likeliest), best, strict=True)
        top = [{text: value} | {top_text: most} for text, value, top_text, most in pairs]
        return Logprobs(texts, [None, *values], [None, *top])

    def _texts(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([token], skip_special_tokens=False) for token in ids]


def _generate(
    body: ChatRequest | CompletionRequest, ids: list[int], number: int, max_tokens: int | None
) -> GenerateBody:
    """Return the request for answer `number` to this prompt: each has its own seed."""
    sampling = SamplingFields(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed + number,
        logprobs=1,
        stop=body.stop or None,
    )
    return GenerateBody(token_ids=ids, sampling_params=sampling, model=body.model, cache_salt=None)


class AbortedWithClient(Response):
    """Response of `whole()`. If the client disconnects first, its requests are aborted."""

    def __init__(
        self, service: Service, streams: list[RequestStream], whole: Callable[[], Awaitable[Response]]
    ) -> None:
        self.service, self.streams, self.whole, self.background = service, streams, whole, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(until_gone(receive))
        gone.add_done_callback(lambda _: [self.service.abort(stream) for stream in self.streams])
        try:
            await self.answer(scope, receive, send)
        finally:
            gone.cancel()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the whole response, and send it."""
        answer = await self.whole()
        await answer(scope, receive, send)
