"""The OpenAI API's requests and replies: JSON of the wire to a `Call`, a `Reply` to JSON. Pure.

What a request asks for and cannot get is refused by name, never ignored: a policy that is trained at other settings
than those it is used at would be a silent fault.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollover.tasks.image_parts import are_parts
from rollover.types import SamplingParams, StopReason
from rollover.workflows.calls import Call, CallRefused, NotSupported, Reply
from rollover.workflows.matching import text_of

Json = dict[str, Any]

_FINISH = {StopReason.LENGTH: "length", StopReason.REPETITION: "length"}
_HARMLESS = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
"""They say something about the request, and ask for nothing."""
_MOST_CHOICES = 128


@dataclass(frozen=True)
class Asked:
    """One request: what is asked of the policy, `num` times, and how the answer is written."""

    model: str
    call: Call
    chat: bool
    num: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    """Whether the answer has the token ids: `return_token_ids`, an extension that other servers have as well."""


def chat_request(body: Any, sampling: SamplingParams) -> Asked:
    """Of /v1/chat/completions. CallRefused names the parameter that cannot be honoured."""
    fields = _Fields(body, sampling)
    messages = fields.take("messages", list)
    if not messages:
        raise CallRefused("messages must be a list with a message at least", "messages")
    checked = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.take("tools", list) or ()))
    choice = fields.take("tool_choice", object) or "auto"
    if choice not in ("auto", "none"):
        raise NotSupported(f"tool_choice = {choice!r:.100}: what is sampled cannot be forced; use auto", "tool_choice")
    fields.only("parallel_tool_calls", True)
    fields.only("response_format", {"type": "text"})
    fields.only("modalities", ["text"])
    fields.only("top_logprobs", 0)
    logprobs = bool(fields.take("logprobs", bool))
    limit, limit_of_old = fields.count("max_completion_tokens"), fields.count("max_tokens")
    call = Call(
        messages=checked,
        tools=tools,
        reads_calls=choice == "auto",
        max_tokens=limit if limit is not None else limit_of_old,
        stop=fields.stop(),
    )
    return fields.asked(call, chat=True, logprobs=logprobs)


def completion_request(body: Any, sampling: SamplingParams) -> Asked:
    """Of /v1/completions: a prompt as a text or as token ids. CallRefused as for chat_request."""
    fields = _Fields(body, sampling)
    prompt = fields.take("prompt", object)
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # a list of prompts, with one
    if isinstance(prompt, list) and prompt and all(type(i) is int and i >= 0 for i in prompt):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str) or not prompt:
        raise CallRefused("prompt must be one text, or the token ids of one", "prompt")
    fields.only("echo", False)
    fields.only("best_of", 1)
    fields.only("suffix", "")
    logprobs = fields.take("logprobs", int)
    if logprobs is not None and logprobs > 1:
        raise NotSupported("logprobs: those of the sampled tokens are there, of no other ones; ask for 1", "logprobs")
    call = Call(prompt=prompt, max_tokens=fields.count("max_tokens"), stop=fields.stop())
    return fields.asked(call, chat=False, logprobs=logprobs is not None)


def error_body(error: CallRefused) -> Json:
    """What the API's clients make an exception of."""
    kind = "invalid_request_error" if error.status != 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def model_list(names: Sequence[str]) -> Json:
    """Of /v1/models."""
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rollover"}
                                       for name in names]}  # fmt: skip


class Writer:
    """Writes the replies to one request."""

    def __init__(self, asked: Asked, token_texts: Any) -> None:
        self.asked, self._token_texts = asked, token_texts

    def whole(self, replies: Sequence[Reply]) -> Json:
        """The body of an answer that is no stream."""
        choices = [self._choice(i, reply, delta=False) for i, reply in enumerate(replies)]
        return self._head(replies, chunk=False) | {"choices": choices, "usage": self._usage(replies)}

    def events(self, replies: Sequence[Reply]) -> Iterator[str]:
        """The events of a stream: every choice in one piece, then its end."""
        head = self._head(replies, chunk=True)
        for i, reply in enumerate(replies):
            choice = self._choice(i, reply, delta=True)
            finish = choice["finish_reason"]
            yield _event(head | {"choices": [choice | {"finish_reason": None}]})
            empty: Json = {"delta": {}} if self.asked.chat else {"text": ""}
            yield _event(head | {"choices": [{"index": i, **empty, "logprobs": None, "finish_reason": finish}]})
        if self.asked.usage_in_stream:
            yield _event(head | {"choices": [], "usage": self._usage(replies)})
        yield "data: [DONE]\n\n"

    # Private

    def _head(self, replies: Sequence[Reply], chunk: bool) -> Json:
        kind = "chat.completion" if self.asked.chat else "text_completion"
        prefix = "chatcmpl" if self.asked.chat else "cmpl"
        suffix = ".chunk" if chunk and self.asked.chat else ""
        return {
            "id": f"{prefix}-{replies[0].reply_id}",
            "object": kind + suffix,
            "created": int(time.time()),
            "model": self.asked.model,
        }

    def _choice(self, index: int, reply: Reply, delta: bool) -> Json:
        finish = _FINISH.get(reply.stop_reason, "stop")
        out: Json = {"index": index, "logprobs": self._logprobs(reply) if self.asked.logprobs else None}
        if not self.asked.chat:
            out["text"] = reply.text
        else:
            message = reply.message
            if reply.tool_calls:
                finish = "tool_calls"
                message["content"] = message["content"] or None
            if delta and reply.tool_calls:
                message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            out["delta" if delta else "message"] = message if delta else message | {"refusal": None}
        if self.asked.token_ids:
            out |= {"prompt_token_ids": list(reply.prompt_ids), "token_ids": reply.token_ids.tolist()}
        return out | {"finish_reason": finish}

    def _logprobs(self, reply: Reply) -> Json:
        texts, values = self._token_texts(reply.token_ids.tolist()), [float(x) for x in reply.logprobs]
        if self.asked.chat:
            tokens = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, values, strict=True)
            ]
            return {"content": tokens, "refusal": None}
        offsets = list(itertools.accumulate(map(len, texts), initial=0))[:-1]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}

    def _usage(self, replies: Sequence[Reply]) -> Json:
        prompt, sampled = len(replies[0].prompt_ids), sum(len(reply.token_ids) for reply in replies)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def error_event(error: CallRefused) -> str:
    """An error after the headers of a stream have gone out."""
    return _event(error_body(error))


# Private


def _event(fields: Json) -> str:
    return f"data: {json.dumps(fields)}\n\n"


class _Fields:
    """The fields of a request's body; those that nobody has taken at the end are refused."""

    def __init__(self, body: Any, sampling: SamplingParams) -> None:
        if not isinstance(body, dict):
            raise CallRefused("the body of a request is a JSON object")
        self._left = {name: value for name, value in body.items() if value is not None}  # null is as if it were absent
        self._sampling = sampling

    def take(self, name: str, kind: type) -> Any:
        value = self._left.pop(name, None)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise CallRefused(f"{name} = {value!r:.100} must be a {_JSON_NAMES[kind]}", name)
        return value

    def only(self, name: str, value: Any) -> None:
        """NotSupported if the field is there with another value."""
        given = self._left.pop(name, value)
        if given != value:
            raise NotSupported(f"{name} = {given!r:.100} cannot be honoured here: leave it out", name)

    def count(self, name: str) -> int | None:
        value = self.take(name, int)
        if value is not None and value < 1:
            raise CallRefused(f"{name} = {value} must be at least 1", name)
        return value

    def stop(self) -> tuple[str, ...]:
        given = self.take("stop", object)
        strings = [given] if isinstance(given, str) else given if given is not None else []
        if not isinstance(strings, list) or not all(isinstance(text, str) and text for text in strings):
            raise CallRefused("stop must be a text, or a list of texts that are not empty", "stop")
        return tuple(strings)

    def asked(self, call: Call, *, chat: bool, logprobs: bool) -> Asked:
        """What is left of the fields is common to both kinds of request."""
        for name in ("temperature", "top_p", "top_k", "min_p"):
            self._is_the_runs(name)
        for name in ("frequency_penalty", "presence_penalty"):
            self.only(name, 0)
        self.only("logit_bias", {})
        self.only("store", False)
        self.only("service_tier", "auto")
        model = self.take("model", str)
        if model is None:
            raise CallRefused("a request names its model", "model")
        num = self.count("n") or 1
        if num > _MOST_CHOICES:
            raise CallRefused(f"n = {num} must be at most {_MOST_CHOICES}", "n")
        stream, options = bool(self.take("stream", bool)), self.take("stream_options", dict) or {}
        token_ids = bool(self.take("return_token_ids", bool))
        if unknown := options.keys() - {"include_usage", "include_obfuscation"}:
            raise NotSupported(f"stream_options: {', '.join(sorted(unknown))} is not known here", "stream_options")
        if unknown := sorted(self._left.keys() - _HARMLESS):
            raise NotSupported(f"{unknown[0]} cannot be honoured here: leave it out", unknown[0])
        usage = bool(options.get("include_usage"))
        return Asked(model, call, chat, num, stream, usage, logprobs, token_ids)

    def _is_the_runs(self, name: str) -> None:
        runs = getattr(self._sampling, name)
        given = self.take(name, float | int)  # type: ignore[arg-type]
        if given is not None and given != runs:
            raise NotSupported(
                f"{name} = {given} is not the run's, {runs:g}, at which every token is sampled (rollout.{name}): leave"
                " it out",
                name,
            )


_JSON_NAMES = {list: "list", dict: "JSON object", str: "text", bool: "true or false", int: "whole number"}
_JSON_NAMES |= {float | int: "number", object: "value"}  # type: ignore[dict-item]


def _message(message: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise CallRefused(f"{where} must be a JSON object with a role", where)
    content = message.get("content")
    try:
        if not are_parts(content):
            text_of(content)
    except ValueError as error:
        raise NotSupported(f"{where}: {error}", f"{where}.content") from error
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls
    ):
        raise CallRefused(f"{where}.tool_calls must be a list of calls of functions", f"{where}.tool_calls")
    return message


def _tool(tool: Any, where: str) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise CallRefused(f"{where} must be the definition of a function, with its name", where)
    if function.get("strict"):
        raise NotSupported(f"{where}: strict cannot be honoured, as what is sampled cannot be forced", where)
    return tool
