"""The fields of OpenAI's requests: which are taken, and how an invalid one is named."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.openai_wire import Refusal, chat_request, completion_request, json_of
from rollover.types import SamplingParams

USER = [{"role": "user", "content": "What is 2+2?"}]
RUN = SamplingParams(temperature=1.0, top_p=0.9)


def test_null_and_empty_stop_strings_are_absent_fields() -> None:
    body = {"model": "m", "messages": USER, "seed": None, "n": None, "tools": None, "stop": ["", "]]"], "user": "me"}
    request = chat_request(body, only={"seed": None}, images=False)
    assert (request.n, request.tools, request.stop, request.most_tokens) == (1, [], ["]]"], None)


def test_parts_of_text_become_one_text_and_images_stay_parts() -> None:
    text, image = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    messages = [{"role": "user", "content": content} for content in ([text, text], [text, image])]
    request = chat_request({"model": "m", "messages": messages}, only={}, images=True)
    assert [message["content"] for message in request.messages] == ["aa", [text, image]]
    with pytest.raises(Refusal, match="must be a text, or a list of parts of type text$"):
        chat_request({"model": "m", "messages": messages}, only={}, images=False)


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"temperature": 0.5}, "temperature", "every token is sampled at the run's, 1 (rollout.temperature): leave it"),
        ({"top_p": 1.0}, "top_p", "top_p = 1.0: every token is sampled at the run's, 0.9"),
        ({"temprature": 1.0}, "temprature", "temprature = 1.0 is not supported here: leave it out"),
        ({"seed": 3}, "seed", "seed = 3 is not supported here"),
        ({"presence_penalty": 0.5}, "presence_penalty", "presence_penalty = 0.5 is not supported here"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice = 'required' is not supported here"),
        ({"n": 129}, "n", "n = 129: must be less than or equal to 128"),
        ({"n": True}, "n", "n = True: must be a valid integer"),
        ({"stop": [3]}, "stop", "stop: must be a text, or a list of texts"),
        ({"messages": []}, "messages", "messages: List should have at least 1 item"),
        ({"messages": [3]}, "messages[0]", "messages[0] = 3: must be a valid dictionary"),
        ({"messages": [{"content": "a"}]}, "messages[0]", "must be a JSON object with a role"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content", "must be a text, or"),
        ({"messages": [USER[0] | {"tool_calls": [3]}]}, "messages[0].tool_calls", "a list of calls of functions"),
        ({"tools": [{"function": {}}]}, "tools[0]", "the definition of a function, with its name"),
        ({"tools": [{"function": {"name": "f", "strict": True}}]}, "tools[0].function.strict", "not supported here"),
        ({"stream_options": {"more": 1}}, "stream_options.more", "not supported here"),
    ],
)
def test_an_invalid_field_of_a_chat_is_refused_by_name(fields: dict[str, Any], param: str, why: str) -> None:
    body = {"model": "m", "messages": USER, "temperature": 1, "top_p": 0.9, "presence_penalty": 0.0}
    chat_request(body, sampling=RUN, only={"seed": None}, images=True)
    with pytest.raises(Refusal) as refused:
        chat_request(body | fields, sampling=RUN, only={"seed": None}, images=True)
    assert refused.value.param == param and why in str(refused.value)


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [1, -1], [1, "a"], [True], [2**31], ["a", [1]], 3])
def test_an_invalid_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(Refusal, match="must be a text, a list of token ids") as refused:
        completion_request({"model": "m", "prompt": prompt}, only={})
    assert refused.value.param == "prompt"


def test_a_prompt_may_stand_alone_and_no_token_needs_echo() -> None:
    for prompt, prompts in (("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])):
        assert completion_request({"model": "m", "prompt": prompt}, only={}).prompts == prompts
    assert completion_request({"model": "m", "prompt": "a", "max_tokens": 0, "echo": True}, only={}).max_tokens == 0
    with pytest.raises(Refusal, match="max_tokens = 0: must be at least 1, unless echo is set"):
        completion_request({"model": "m", "prompt": "a", "max_tokens": 0}, only={})


@pytest.mark.parametrize("body", [b'"\xed\xa0\x80"', b'"\\ud800"', '"a"'.encode("utf-16")])
def test_half_a_pair_of_surrogates_is_refused_however_it_is_written(body: bytes) -> None:
    with pytest.raises(Refusal, match="no Unicode"):
        json_of(body, 1000)


def test_a_number_that_no_engine_can_hold_is_refused() -> None:
    with pytest.raises(Refusal, match="top_k = 1000000.*must be less than or equal to 2147483647"):
        chat_request({"model": "m", "messages": USER, "top_k": 10**30}, only={}, images=False)
