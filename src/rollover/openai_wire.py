"""OpenAI's API as our servers speak it: requests checked, answers written. No HTTP, no asyncio.

    the gateway of a run (workflows/gateway.py)  agents: tools, images; every token at the run's sampling
    rollover serve (engine/server/texts.py)      benchmarks: sampling of their own, echo, several prompts

A field that a server does not support is refused by name, never ignored: a policy that is trained at other settings
than those it is used at would be a silent fault. Where the two differ, they say so in the arguments of `chat_request`
and `completion_request`.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rollover.functions import shortened
from rollover.tasks.image_parts import are_parts, shows_images
from rollover.types import SamplingParams, StopReason

Json = dict[str, Any]
Number = Annotated[float, Field(allow_inf_nan=False)]

_NO_EFFECT = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
_FIXED: Json = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "top_logprobs": 0,
    "best_of": 1,
    "suffix": "",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "store": False,
    "service_tier": "auto",
}
"""Fields of the API with the one value that is supported."""
NO_LOGPROB = -9999.0  # vLLM's number for NaN and infinity, which JSON does not have


class Refusal(ValueError):
    """A request that is answered with an error. `status`: of HTTP. `code`: for programs; None: the status, as in vLLM.
    `param`: the invalid field."""

    status: int = 400
    code: str | None = None

    def __init__(
        self, message: str, param: str | None = None, status: int | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status or self.status, code or self.code

    def as_json(self) -> Json:
        """Return the body of the answer: OpenAI's clients make an exception of it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code or self.status}}


# Requests


def json_of(body: bytes | int, most_bytes: int) -> Any:
    """Return the JSON value of a body as `http_server.body_of` returns it. Refusal of what is too long or no JSON."""
    if isinstance(body, int):
        raise Refusal(
            f"the request has {body:,} bytes: at most {most_bytes:,} are read", "body", code="context_length_exceeded"
        )
    try:
        value = json.loads(body.decode())
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError:  # half of a pair of surrogates: no answer could repeat it, and no tokenizer reads it
        raise Refusal("body: a text in it is no Unicode", "body") from None
    except (ValueError, RecursionError) as error:  # the second where it is nested too deeply
        raise Refusal(f"body: no JSON ({error})", "body") from error
    return value


MAX_ID = 2**31 - 1
"""The largest token id of a request."""


class Fields(BaseModel):
    """The fields of a JSON object. Other names, and values of other types, are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


_Kind = TypeVar("_Kind", bound=Fields)


def checked(kind: type[_Kind], value: Any) -> _Kind:
    """Return the fields of a JSON value. Refusal that names the first invalid one."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:] or "body"
        if first["type"] == "missing":
            raise Refusal(f"{param} is missing", param) from None
        if first["type"] in ("extra_forbidden", "literal_error", "none_required"):
            raise _not_supported(param, first["input"]) from None
        why = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
        raise Refusal(f"{_assigned(param, first['input'])}: {why}", param) from None


def _assigned(param: str, value: Any) -> str:
    """Return a field with its value, without a long value."""
    return param if isinstance(value, list | dict) else f"{param} = {shortened(value)}"


class StreamOptions(Fields):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False  # of no effect
    continuous_usage_stats: Literal[False] = False


def _stops(value: Any) -> list[str]:
    """Return the stop strings without the empty one, which benchmarks send for "none"."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a text, or a list of texts")
    return [text for text in texts if text]


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """All of them: one may stand alone."""
    prompts = [value] if isinstance(value, str) or _are_ids(value) else value
    if isinstance(prompts, list) and prompts:
        if all(isinstance(prompt, str) and prompt for prompt in prompts) or all(map(_are_ids, prompts)):
            return prompts
    raise ValueError("must be a text, a list of token ids, or a list of either, none of them empty")


def _are_ids(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(token) is int and 0 <= token <= MAX_ID for token in value)


class _Request(Fields):
    """The fields of both endpoints."""

    model: str
    temperature: Number = Field(1.0, ge=0)
    top_p: Number = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_ID)
    min_p: Number = Field(0.0, ge=0, le=1)
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    """An extension of vLLM: the answer has the token ids."""


class ChatRequest(_Request):
    """The body of POST /v1/chat/completions. The content of a message is a text, or parts with an image among them."""

    messages: list[Json] = Field(min_length=1)
    tools: list[Json] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        """Return the limit of the answer, by the newer name of the field or the older one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(_Request):
    """The body of POST /v1/completions. `prompts`: texts, or token ids."""

    prompts: Annotated[list[Any], BeforeValidator(_prompts)] = Field(alias="prompt")
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=1)
    echo: bool = False


def chat_request(
    body: Any, *, sampling: SamplingParams | None = None, only: Mapping[str, Any], images: bool
) -> ChatRequest:
    """Return the request of a chat's body. `sampling`: that of a server at which every token is sampled alike; None:
    the request's own. `only`: fields with the one value that this server supports (None: none). `images`: messages may
    show some. Refusal that names the field that is invalid or not supported; null is as if a field were absent."""
    request = _request(ChatRequest, body, sampling, only)
    request.messages = [_message(message, f"messages[{i}]", images) for i, message in enumerate(request.messages)]
    for i, tool in enumerate(request.tools):
        _check_tool(tool, f"tools[{i}]")
    return request


def completion_request(
    body: Any, *, sampling: SamplingParams | None = None, only: Mapping[str, Any]
) -> CompletionRequest:
    """Return the request of a completion's body. Arguments and Refusal as of `chat_request`."""
    request = _request(CompletionRequest, body, sampling, only)
    if request.max_tokens == 0 and not request.echo:
        raise Refusal("max_tokens = 0: must be at least 1, unless echo is set", "max_tokens")
    return request


def _request(kind: type[_Kind], body: Any, sampling: SamplingParams | None, only: Mapping[str, Any]) -> _Kind:
    if not isinstance(body, dict):
        raise Refusal("body: must be a JSON object", "body")
    given = {name: value for name, value in body.items() if value is not None and name not in _NO_EFFECT}
    for name, value in (_FIXED | dict(only)).items():
        if given.pop(name, value) != value:
            raise _not_supported(name, body[name])
    for name in ("temperature", "top_p", "top_k", "min_p") if sampling is not None else ():
        if (value := given.pop(name, None)) is not None and value != (of_run := getattr(sampling, name)):
            why = f"{name} = {shortened(value)}: every token is sampled at the run's, {of_run:g} (rollout.{name}): "
            raise Refusal(why + "leave it out", name, code="unsupported_parameter")
    return checked(kind, given)


def _not_supported(param: str, value: Any) -> Refusal:
    why = f"{_assigned(param, value)} is not supported here: leave it out"
    return Refusal(why, param, code="unsupported_parameter")


def _message(message: Json, where: str, images: bool) -> Json:
    """Return the message, with parts of text as one text."""
    if not isinstance(message.get("role"), str):
        raise Refusal(f"{where}: must be a JSON object with a role", where)
    content = message.get("content")
    if (
        isinstance(content, list)
        and not shows_images(content)
        and all(type(part.get("text")) is str for part in content)
    ):
        message = message | {"content": "".join(part["text"] for part in content)}
    elif not (content is None or isinstance(content, str) or (images and are_parts(content))):
        kinds = "text and image_url" if images else "text"
        why = f"{where}.content: must be a text, or a list of parts of type {kinds}"
        raise Refusal(why, f"{where}.content", code="unsupported_parameter")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise Refusal(f"{where}.tool_calls: must be a list of calls of functions", f"{where}.tool_calls")
    return message


def _check_tool(tool: Json, where: str) -> None:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(f"{where}: must be the definition of a function, with its name", where)
    if function.get("strict"):
        raise _not_supported(f"{where}.function.strict", True)


# Answers


def finish_reason(reason: StopReason) -> str:
    """Return the API's finish_reason of a stop reason."""
    return "length" if reason.is_cut else "stop"


def finite(logprob: float) -> float:
    """Return a log-prob as JSON can hold it."""
    return float(logprob) if math.isfinite(logprob) else NO_LOGPROB


def usage(num_prompt: int, num_sampled: int) -> Json:
    """Return the token counts of an answer."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def model_list(names: Sequence[str], **more: Any) -> Json:
    """Return the body of /v1/models. `more`: fields of each model."""
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "rollover", **more} for name in names]
    return {"object": "list", "data": models}


def event(value: Any) -> str:
    """Format a server-sent event."""
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Logprobs:
    """Texts and log-probs of tokens, and for each position the log-probs of its alternatives by text."""

    tokens: list[str] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    top: list[Json | None] = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """One sampled answer. `tool_calls`: as in an assistant's message; `text` is without them. `of_prompt`: of a prompt
    that `text` echoes."""

    prompt_ids: Sequence[int]
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    tool_calls: Sequence[Json] = ()
    of_prompt: Logprobs = Logprobs()


class Answer:
    """The answer to a request: its `choices`, n to each prompt. `token_texts`: the text of each token by itself."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        answer_id: str,
        choices: Sequence[Choice],
        token_texts: Callable[[Sequence[int]], list[str]],
    ) -> None:
        self.request, self.choices, self._token_texts = request, choices, token_texts
        self._is_chat = isinstance(request, ChatRequest)
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{answer_id}",
            "created": int(time.time()),
            "model": request.model,
        }

    def whole(self) -> Json:
        """Return the body of an answer that is not streamed."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        choices = [self._choice(i, choice) for i, choice in enumerate(self.choices)]
        return self._head | {"object": kind, "choices": choices, "usage": self._usage()}

    def events(self) -> Iterator[str]:
        """Return the events of a stream: every choice in one piece, then its end."""
        head = self._head | {"object": "chat.completion.chunk" if self._is_chat else "text_completion"}
        for i, choice in enumerate(self.choices):
            whole = self._choice(i, choice)
            if self._is_chat:
                delta = whole.pop("message")
                if choice.tool_calls:
                    delta["tool_calls"] = [{"index": k, **call} for k, call in enumerate(choice.tool_calls)]
                whole["delta"] = delta
            yield event(head | {"choices": [whole | {"finish_reason": None}]})
            end: Json = {"delta": {}} if self._is_chat else {"text": ""}
            end |= {"index": i, "logprobs": None, "finish_reason": whole["finish_reason"]}
            yield event(head | {"choices": [end]})
        if self.request.stream_options.include_usage:
            yield event(head | {"choices": [], "usage": self._usage()})
        yield DONE

    # Private

    def _choice(self, index: int, choice: Choice) -> Json:
        finish = "tool_calls" if choice.tool_calls else choice.finish_reason
        out: Json = {"index": index, "logprobs": None, "finish_reason": finish}
        if isinstance(self.request, ChatRequest):
            out["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.tool_calls:
                out["message"] |= {"content": choice.text or None, "tool_calls": list(choice.tool_calls)}
            if self.request.logprobs:
                out["logprobs"] = self._chat_logprobs(choice)
        else:
            out["text"] = choice.text
            if self.request.logprobs is not None:
                out["logprobs"] = self._completion_logprobs(choice)
        if self.request.return_token_ids:
            out |= {"prompt_token_ids": list(choice.prompt_ids), "token_ids": list(choice.token_ids)}
        return out

    def _chat_logprobs(self, choice: Choice) -> Json:
        pairs = zip(self._token_texts(choice.token_ids), map(finite, choice.logprobs), strict=True)
        tokens = [{"token": t, "logprob": v, "bytes": list(t.encode()), "top_logprobs": []} for t, v in pairs]
        return {"content": tokens, "refusal": None}

    def _completion_logprobs(self, choice: Choice) -> Json:
        texts, values = self._token_texts(choice.token_ids), [finite(logprob) for logprob in choice.logprobs]
        tokens = [*choice.of_prompt.tokens, *texts]
        return {
            "tokens": tokens,
            "token_logprobs": [*choice.of_prompt.values, *values],
            "top_logprobs": [*choice.of_prompt.top, *({t: v} for t, v in zip(texts, values, strict=True))],
            "text_offset": list(itertools.accumulate(map(len, tokens), initial=0))[:-1],
        }

    def _usage(self) -> Json:
        num_prompt = sum(len(choice.prompt_ids) for choice in self.choices[:: self.request.n])
        return usage(num_prompt, sum(len(choice.token_ids) for choice in self.choices))
