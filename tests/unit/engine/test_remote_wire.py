"""What is sent to a server, and what is understood of its answer."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from rollover.config.logits import LogitsProcessing
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.engine.remote.client import ServerFailed
from rollover.engine.remote.dialect import Chunk, GenerateRequest, ShownPrompt, Span, label_of, version_of
from rollover.engine.remote.engine import without
from rollover.engine.remote.server import check_expansion
from rollover.engine.remote.vllm import parse_event, request_body
from rollover.types import Media, Prompt, SamplingParams

REQUEST = ExtendRequest(
    "3-1", Prompt((1, 2)), (5,), 9, 77, SamplingParams(0.5, 0.9, 3, 0.1), StopCriteria(frozenset({8, 4}), ("x",), 16)
)


def asked(*new_tokens: int, **fields: Any) -> GenerateRequest:
    return GenerateRequest("3-1.12", REQUEST, [1, 2, 5, *new_tokens], 4, **fields)


def event(**choice: object) -> str:
    return json.dumps({"choices": [{"index": 0, "finish_reason": None, "logprobs": None, **choice}]})


def test_a_request_has_all_tokens_so_far_and_a_budget_and_leaves_stop_strings_to_us() -> None:
    body = request_body(asked(6, 7))
    assert body["token_ids"] == [1, 2, 5, 6, 7] and body["request_id"] == "3-1.12" and body["stream"] is True
    sampling = body["sampling_params"]
    assert sampling == {
        "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "logprobs": 0, "ignore_eos": True,
        "stop_token_ids": [4, 8], "seed": asked(6, 7).seed,
    }  # fmt: skip
    assert "cache_salt" not in body and request_body(asked(cache_salt="r/2"))["cache_salt"] == "r/2"


def test_seeds_differ_by_rollout_and_first_token_and_have_63_bits() -> None:
    seeds = {
        replace(asked(*range(index)), extend=replace(REQUEST, seed=seed)).seed
        for seed in range(20)
        for index in range(20)
    }
    assert len(seeds) == 400 and all(0 <= seed < 2**63 for seed in seeds) and max(seeds) > 2**61


def test_a_label_is_of_one_run_and_one_version() -> None:
    assert version_of(label_of("my/run-1a", 12), "my/run-1a") == 12
    assert [version_of(label, "run") for label in ("default", "other/3", "run/x", "run", "run/3/4")] == [None] * 5


def test_chunks() -> None:
    logprobs = {"content": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -0.1}]}
    spans = [{"version": "r/1", "start": 0, "end": 2}]
    chunk = parse_event(event(token_ids=[5, 6], logprobs=logprobs, finish_reason="stop", weight_versions=spans))
    assert chunk is not None
    assert (chunk.token_ids, chunk.logprobs, chunk.finish_reason) == ((5, 6), (-0.5, -0.1), "stop")
    assert chunk.spans == (Span("r/1", 0, 2),)
    last = parse_event(event(token_ids=[], finish_reason="abort"))
    assert last is not None and (last.token_ids, last.finish_reason, last.spans) == ((), "abort", None)
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}
    counted = parse_event(json.dumps(usage))
    assert counted is not None and counted.cached_tokens == 4
    assert parse_event("[DONE]") is None


@pytest.mark.parametrize(
    "data",
    [
        "",
        "[]",
        "{}",
        "null",
        event(token_ids=[1]),
        event(token_ids=["x"]),
        event(),
        '{"choices": [1]}',
        event(token_ids=[True], logprobs={"content": [{"logprob": -1.0}]}),
        event(token_ids=[1], logprobs={"content": [{"logprob": True}]}),
        event(token_ids=[1], logprobs={"content": [{"logprob": False}]}),
        event(token_ids=[1], logprobs={"content": [{"logprob": "-1.0"}]}),
        event(token_ids=[], weight_versions=[{"version": "r/1", "start": False, "end": True}]),
        '{"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": true}}}',
        '{"error": {"code": 500}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_chunk_is_a_failure_of_the_server(data: str) -> None:
    with pytest.raises(ServerFailed):
        parse_event(data)


def test_an_error_of_code_400_is_the_requests_own() -> None:
    with pytest.raises(ValueError, match="too long"):
        parse_event('{"error": {"message": "too long", "code": 400}}')


def test_images_travel_as_content_parts_and_the_served_prompt_comes_back() -> None:
    part = {"type": "image_url", "url": "data:image/png;base64,AAAA", "digest": "d"}
    body = request_body(asked(images=[part]))
    assert body["content_parts"] == [part] and body["return_token_ids"] is True
    (renamed,) = request_body(asked(images=[part], image_salt="r/3"))["content_parts"]
    assert renamed == part | {"uuid": "d/r/3"}
    first = {
        "choices": [{"index": 0, "token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}]}}],
        "prompt_token_ids": [1, 9, 9, 2],
        "mm_placeholders": {"image": [{"offset": 1, "length": 2}]},
    }
    assert parse_event(json.dumps(first)) == Chunk((5,), (-0.5,), shown=ShownPrompt((1, 9, 9, 2), ((1, 3),)))
    with pytest.raises(ServerFailed, match="invalid chunk of tokens"):
        parse_event(json.dumps(first | {"mm_placeholders": {"image": [{"offset": -1, "length": 2}]}}))


@pytest.mark.parametrize(
    ("served", "ranges", "problem"),
    [
        ([1, 9, 9, 2, 9, 9], [(1, 3), (3, 6)], None),  # with a token around the second
        ([1, 9, 9, 2, 9, 9], [(1, 3)], "b.png: the server shows it nowhere, and the prompt at tokens 4 to 6"),
        ([1, 9, 9, 2, 9, 9], [(1, 2), (4, 6)], "a.png: the server shows it at tokens 1 to 2"),
        ([1, 9, 9, 2, 9, 9], [(1, 3), (4, 6), (6, 7)], "a.png: the server made 6 tokens of a prompt of 6 with 2"),
        ([1, 9, 9, 9, 2, 9, 9], [(1, 3), (4, 6)], "a.png: the server made 7 tokens of a prompt of 6"),
        (None, [(1, 3), (4, 6)], "a.png: the server made no tokens"),
    ],
)
def test_an_expansion_is_checked_image_by_image(
    served: list[int] | None, ranges: list[tuple[int, int]], problem: str | None
) -> None:
    media = [Media("b.png", "", (8, 8), 4, 2), Media("a.png", "", (8, 8), 1, 2)]
    if problem is None:
        check_expansion(media, [1, 9, 9, 2, 9, 9], served, ranges)
        return
    with pytest.raises(ValueError, match=f"image {problem}"):
        check_expansion(media, [1, 9, 9, 2, 9, 9], served, ranges)


def test_placeholders_get_no_probability_whatever_the_bias_of_the_run() -> None:
    processing = without(LogitsProcessing(logit_bias=((3, 5.0), (4, 1.0)), min_new_tokens=2), [7, 3])
    body = request_body(GenerateRequest("0-0.1", replace(REQUEST, processing=processing), [1, 2], 4))
    assert body["sampling_params"]["logit_bias"] == {"3": -100.0, "4": 1.0, "7": -100.0}
    assert processing == LogitsProcessing(logit_bias=((3, -math.inf), (4, 1.0), (7, -math.inf)), min_new_tokens=2)
