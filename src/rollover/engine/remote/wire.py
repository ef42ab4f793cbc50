"""What goes between this engine and a server, as vLLM speaks it: requests out, events of a stream in. Pure; no socket.

ExtendRequest ──request_body──▶ POST /inference/v1/generate ──"data: {...}" lines──parse_event──▶ Chunk
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollover.config.logits import LogitsProcessing
from rollover.engine.protocol import ExtendRequest

GENERATE = "/inference/v1/generate"
FIRST_LABEL = "default"  # of the weights that a server was started with
_DONE = "[DONE]"
_MOST_TOKEN = 2**31  # a Segment has 32 bits for each
_LEAST_BIAS = -100.0  # the most that servers take: e^-100 of a probability is below the smallest float32
# It aborts by this id alone: by the bare one it answers that it did, and goes on.
_ABORT_PREFIX = "generate-tokens-"


class ServerFailed(RuntimeError):
    """A server did not do what it was asked for; what it had given before counts."""


class Refused(ServerFailed):
    """A server answered that it will not do this, and is as it was before. `status`: of its answer; 0: it said so in
    another way."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a request were sampled by the weights with this label."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """The prompt as a server computes it: `token_ids` with expanded placeholders, and the [start, end) of each image's
    tokens, in order."""

    token_ids: tuple[int, ...]
    images: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one event of a stream brought. `spans` and `finish_reason` come with the last tokens; `cached_tokens`, after
    them: how many of the prompt's had been computed before."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    spans: tuple[Span, ...] | None = None
    cached_tokens: int | None = None
    shown: ShownPrompt | None = None
    """With the first tokens, where the request has images."""


def request_body(
    request: ExtendRequest,
    request_id: str,
    new_tokens: Sequence[int],
    max_tokens: int,
    salt: str | None,
    images: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Ask for at most `max_tokens` after `new_tokens` of this extend. Without max_tokens a server would give 16.

    `images`: content_parts of the images that the prompt shows (media.py).
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "request_id": request_id,
        "token_ids": [*request.prompt.ids, *request.generated_ids, *new_tokens],
        "stream": True,
        "stream_options": {"include_usage": True},
        "sampling_params": {
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": request_seed(request.seed, len(request.generated_ids) + len(new_tokens)),
            "logprobs": 0,
            "ignore_eos": True,  # the stop tokens are those of the request
            "stop_token_ids": sorted(request.stop_token_ids),
            **_processing(request, len(request.generated_ids) + len(new_tokens) - request.text_start, max_tokens),
        },
    }
    if images:
        body |= {"content_parts": list(images), "return_token_ids": True}
    return body if salt is None else body | {"cache_salt": salt}


def _processing(request: ExtendRequest, num_answer: int, max_tokens: int) -> dict[str, Any]:
    """What is done to the logits of the `max_tokens` after the answer's `num_answer`: all that config/logits.py lets
    through."""
    asked, out = request.processing, {}
    if asked.repetition_penalty != 1:  # of the prompt's tokens and the answer's alike: all that the server is given
        out["repetition_penalty"] = asked.repetition_penalty
    if asked.min_new_tokens > num_answer:
        out["min_tokens"] = min(asked.min_new_tokens - num_answer, max_tokens)  # vLLM refuses more than max_tokens
    if asked.logit_bias:
        out["logit_bias"] = {str(token): max(bias, _LEAST_BIAS) for token, bias in asked.logit_bias}
    return out


def without(processing: LogitsProcessing, token_ids: Iterable[int]) -> LogitsProcessing:
    """`processing`, and these tokens get no probability that float32 has."""
    bias = dict(processing.logit_bias) | dict.fromkeys(token_ids, _LEAST_BIAS)
    return replace(processing, logit_bias=tuple(sorted(bias.items())))


def request_seed(seed: int, index: int) -> int:
    """Of the request that begins at this token of the rollout, 63 bits: a server draws anew from it."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def abort_body(request_ids: Sequence[str]) -> dict[str, list[str]]:
    """End these requests; there is at least one, as none means all of everyone's."""
    assert request_ids
    return {"request_ids": [_ABORT_PREFIX + request_id for request_id in request_ids]}


def label_of(run: str, version: int) -> str:
    return f"{run}/{version}"


def version_of(label: str, run: str) -> int | None:
    """The policy version behind a label; None: it is not of this run."""
    whose, _, version = label.rpartition("/")
    return int(version) if whose == run and version.isdecimal() else None


def longest_of(models: Any) -> int | None:
    """Tokens of the longest rollout that a server takes, of its answer to /v1/models; None where it does not say."""
    try:
        longest = models["data"][0]["max_model_len"]
    except (LookupError, TypeError):
        return None
    return longest if type(longest) is int else None


def parse_event(data: str) -> Chunk | None:
    """What stands after "data:"; None at the end of a stream.

    ServerFailed for an error, or what is no chunk; ValueError for an error of code 400: no server can ever do this.
    """
    if data == _DONE:
        return None
    try:
        event = json.loads(data)
        error = event.get("error")
    except (ValueError, AttributeError, RecursionError) as failure:
        raise ServerFailed(f"it sent what is no JSON object: {data[:200]}") from failure
    if error is not None:
        said, code = (error.get("message", error), error.get("code")) if isinstance(error, dict) else (error, None)
        raise ValueError(str(said)) if code == 400 else ServerFailed(f"it failed: {said}")
    try:
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        if not event["choices"]:
            cached = details.get("cached_tokens")
            return Chunk(cached_tokens=None if cached is None else _whole(cached))
        return replace(_chunk(event["choices"][0]), shown=_shown(event))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as failure:
        raise ServerFailed(f"it sent what is no chunk of tokens ({failure!r}): {data[:200]}") from failure


def _chunk(choice: dict[str, Any]) -> Chunk:
    ids = tuple(map(_whole, choice["token_ids"] or ()))
    content = (choice.get("logprobs") or {}).get("content") or ()
    logprobs = [_number(entry["logprob"]) for entry in content]
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probs")
    spans = choice.get("weight_versions")
    given = None if spans is None else tuple(map(_span, spans))
    return Chunk(ids, tuple(logprobs), choice.get("finish_reason"), given)


def _shown(event: dict[str, Any]) -> ShownPrompt | None:
    if event.get("prompt_token_ids") is None:
        return None
    ranges = (event.get("mm_placeholders") or {}).get("image") or ()
    at = [(_whole(of["offset"]), _whole(of["length"])) for of in ranges]
    return ShownPrompt(tuple(map(_whole, event["prompt_token_ids"])), tuple((i, i + num) for i, num in at))


def _span(given: dict[str, Any]) -> Span:
    return Span(str(given["version"]), _whole(given["start"]), _whole(given["end"]))


def _whole(number: object) -> int:
    if type(number) is not int or not 0 <= number < _MOST_TOKEN:
        raise ValueError(f"{number!r} is no token, and no number of tokens")
    return number


def _number(value: object) -> float:
    if type(value) not in (int, float):  # true is an int to Python
        raise ValueError(f"{value!r} is no number")
    return float(value)  # type: ignore[arg-type]
