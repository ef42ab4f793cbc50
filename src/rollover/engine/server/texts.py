"""The OpenAI API's text endpoints of a served engine: what benchmarks and other programs ask, which know no token ids.

    POST /v1/completions         texts or token ids, several at once; echo with logprobs: of the prompt's tokens, too
    POST /v1/chat/completions    messages, by the model's chat template

Owns the bodies of both and their answers; the tokens come from the Service. The log-prob of an answer's token is that
of what it was drawn from (0 at temperature 0), of a prompt's token that at temperature 1. Sampling is the request's
own, as a program that measures a model chooses it. Nothing is streamed. What is not honoured is refused by name.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from jinja2 import TemplateError
from pydantic import Field
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from rollover.engine.server.requests import Fields, GenerateBody, Number, Refusal, SamplingFields, checked
from rollover.engine.server.service import Service
from rollover.engine.server.stream import Chunk, Stream
from rollover.http_server import until_gone
from rollover.models.chat_template import prompt_arguments

_MOST_ANSWERS = 4096  # of one request: it is no way to hold the others up for hours
_COMPLETION_TOKENS = 16  # where a completion's request does not say how many
_Body = TypeVar("_Body", bound="_Asked")
_Id = Annotated[int, Field(ge=0)]
Json = dict[str, Any]


class _Asked(Fields):
    """What both endpoints have in common. Fields with one legal value are the API's, and not honoured here."""

    model: str
    temperature: Number = Field(1.0, ge=0)
    top_p: Number = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: Number = Field(0.0, ge=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int = Field(1, ge=1, le=128)
    user: str | None = None
    # Not honoured:
    stream: Literal[False] | None = None
    stream_options: None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: None = None

    @property
    def stops(self) -> list[str]:
        """`stop` as a list, without the empty string, which benchmarks send for "nothing"."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    def generate(self, ids: list[int], number: int, max_tokens: int | None) -> GenerateBody:
        """The request of answer `number` to this prompt: each has a seed of its own."""
        sampling = SamplingFields(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed + number,
            logprobs=1,
            stop=self.stops or None,
        )
        return GenerateBody(token_ids=ids, sampling_params=sampling, model=self.model, cache_salt=None)


class CompletionBody(_Asked):
    """The body of POST /v1/completions."""

    prompt: str | list[str] | list[_Id] | list[list[_Id]]
    max_tokens: int = Field(_COMPLETION_TOKENS, ge=0)
    logprobs: int | None = Field(None, ge=0, le=1)
    echo: bool = False
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All of them: one may stand alone."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class ChatBody(_Asked):
    """The body of POST /v1/chat/completions. An answer that the messages end with is continued, unless
    add_generation_prompt is set."""

    messages: list[Json] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    tools: None = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


@dataclass(frozen=True)
class _Sampled:
    """An answer: its tokens, their log-probs, its text up to a stop string, and why it ended."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class _Logprobs:
    """Of some tokens: their texts, log-probs, and the log-probs by text of each and the likeliest one."""

    tokens: list[str] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    top: list[Json | None] = field(default_factory=list)


class TextEndpoints:
    """Answers the two endpoints with `service`. `tokenizer`: the model's."""

    def __init__(self, service: Service, tokenizer: Any) -> None:
        self.service, self.tokenizer = service, tokenizer

    async def completions(self, value: Any) -> Response:
        """Of /v1/completions."""
        body = _body(CompletionBody, value, self.service.model_name)
        if (num := len(body.prompts) * body.n) > _MOST_ANSWERS:
            raise Refusal(
                f"prompt: {num:,} answers are asked for, and {_MOST_ANSWERS:,} are the most at a time", "prompt"
            )
        prompts = [self._ids(prompt) for prompt in body.prompts]
        if not prompts:
            raise Refusal("prompt: there is none", "prompt")
        known = [self._prompt_logprobs(ids) for ids in prompts] if body.echo and body.logprobs is not None else []
        streams = await self._begin(body, prompts, body.max_tokens) if body.max_tokens else []
        return _Answer(self.service, streams, lambda: self._completed(body, prompts, known, streams))

    async def chat(self, value: Any) -> Response:
        """Of /v1/chat/completions."""
        body = _body(ChatBody, value, self.service.model_name)
        ids = self._chat_ids(body)
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        streams = await self._begin(body, [ids], limit)
        return _Answer(self.service, streams, lambda: self._chatted(body, ids, streams))

    # Private

    def _ids(self, prompt: str | list[int]) -> list[int]:
        ids = list(self.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else prompt
        if not ids:
            raise Refusal("prompt: one of them has no token", "prompt")
        return ids

    def _chat_ids(self, body: ChatBody) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise Refusal("messages: the model has no chat template; use /v1/completions", "messages")
        if any(_has_other_parts(message.get("content")) for message in body.messages):
            raise Refusal("messages: of the parts of a content only those of type text are taken", "messages")
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
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise Refusal(f"messages: the model's chat template refuses them: {error}", "messages") from error

    async def _begin(self, body: _Asked, prompts: list[list[int]], max_tokens: int | None) -> list[Stream]:
        """`n` answers to each prompt, in order."""
        streams: list[Stream] = []
        try:
            for ids in prompts:
                for number in range(body.n):
                    streams.append(await self.service.generate(body.generate(ids, number, max_tokens)))
        except BaseException:
            for stream in streams:
                self.service.abort(stream)
            raise
        return streams

    async def _sampled(self, body: _Asked, stream: Stream) -> _Sampled:
        whole = Chunk.joined([chunk async for some in stream.chunks() for chunk in some])
        text = self.tokenizer.decode(whole.token_ids, skip_special_tokens=True)
        ends = [place for stop in body.stops if (place := text.find(stop)) >= 0]
        return _Sampled(
            whole.token_ids, whole.logprobs, text[: min(ends)] if ends else text, whole.finish_reason or "stop"
        )

    async def _completed(
        self, body: CompletionBody, prompts: list[list[int]], known: list[_Logprobs], streams: list[Stream]
    ) -> Json:
        """`known`: of the prompts, where they are asked for."""
        answers = [await self._sampled(body, stream) for stream in streams]
        answers = answers or [_Sampled([], [], "", "length")] * (len(prompts) * body.n)
        choices = []
        for index, answer in enumerate(answers):
            ids, of_prompt = prompts[index // body.n], known[index // body.n] if known else _Logprobs()
            text = (self.tokenizer.decode(ids, skip_special_tokens=False) if body.echo else "") + answer.text
            logprobs = None if body.logprobs is None else self._logprobs(of_prompt, answer)
            choices.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": answer.finish_reason})
        return self._whole("cmpl", "text_completion", choices, sum(map(len, prompts)), answers)

    async def _chatted(self, body: ChatBody, ids: list[int], streams: list[Stream]) -> Json:
        answers = [await self._sampled(body, stream) for stream in streams]
        choices = []
        for index, answer in enumerate(answers):
            content = [
                {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                for token, value in zip(self._texts(answer.token_ids), answer.logprobs, strict=True)
            ]
            message = {"role": "assistant", "content": answer.text}
            logprobs = {"content": content} if body.logprobs else None
            choices.append(
                {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}
            )
        return self._whole("chatcmpl", "chat.completion", choices, len(ids), answers)

    def _prompt_logprobs(self, ids: list[int]) -> _Logprobs:
        """Nobody knows that of the first token. The likeliest one stands beside each of the others."""
        try:
            values, likeliest, best = self.service.engine.prompt_logprobs(ids)
        except ValueError as error:
            raise Refusal(str(error), "prompt") from error
        texts = self._texts(ids)
        pairs = zip(texts[1:], values, self._texts(likeliest), best, strict=True)
        top = [{text: value} | {top_text: most} for text, value, top_text, most in pairs]
        return _Logprobs(texts, [None, *values], [None, *top])

    def _logprobs(self, of_prompt: _Logprobs, answer: _Sampled) -> Json:
        """Those of the answer behind them, each without others beside it."""
        texts = self._texts(answer.token_ids)
        top = [{text: value} for text, value in zip(texts, answer.logprobs, strict=True)]
        tokens = [*of_prompt.tokens, *texts]
        return {
            "tokens": tokens,
            "token_logprobs": [*of_prompt.values, *answer.logprobs],
            "top_logprobs": [*of_prompt.top, *top],
            "text_offset": list(itertools.accumulate(map(len, tokens), initial=0))[:-1],
        }

    def _texts(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([token], skip_special_tokens=False) for token in ids]

    def _whole(self, prefix: str, kind: str, choices: list[Json], num_prompt: int, answers: list[_Sampled]) -> Json:
        num = sum(len(answer.token_ids) for answer in answers)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num, "total_tokens": num_prompt + num}
        head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
        return head | {"model": self.service.model_name, "choices": choices, "usage": usage}


def _has_other_parts(content: Any) -> bool:
    """Whether a content has parts that are no texts: a template would leave images out, or show them without pixels."""
    parts = content if isinstance(content, list) else []
    return any(not isinstance(part, dict) or part.get("type") != "text" for part in parts)


def _body(kind: type[_Body], value: Any, model: str) -> _Body:
    body = checked(kind, value)
    if body.model != model:
        raise Refusal(f"model: there is no {body.model!r} here, but {model!r}", "model", 404)
    return body


class _Answer(Response):
    """One JSON object, when everything is there. A client that goes away before aborts its requests."""

    def __init__(self, service: Service, streams: list[Stream], whole: Callable[[], Coroutine[Any, Any, Json]]) -> None:
        self.service, self.streams, self.whole, self.background = service, streams, whole, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(until_gone(receive))
        gone.add_done_callback(lambda _: [self.service.abort(stream) for stream in self.streams])
        try:
            answer = JSONResponse(await self.whole())
        except Refusal as error:
            answer = JSONResponse(error.as_json(), status_code=error.status)
        finally:
            gone.cancel()
        await answer(scope, receive, send)
