"""A conversation that ends with an assistant's message is continued, wherever prompts are made of conversations."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.envs.chat import Chat
from rollover.models.chat_template import prompt_arguments
from rollover.tasks.prompts import encode_prompt
from rollover.types import Task

USER = {"role": "user", "content": "3+4?"}
BEGUN = {"role": "assistant", "content": "Let me think.\n<think>"}
CLOSING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(template: str = CLOSING) -> Any:
    from rollover.recipes.toy_model import character_tokenizer

    return character_tokenizer(template)


def prompt(*messages: dict[str, Any]) -> str:
    task = Task("t", "s", "r", messages=messages)
    return tokenizer().decode(encode_prompt(task, tokenizer()).ids)


def test_an_answer_that_was_begun_is_continued() -> None:
    assert prompt(USER, BEGUN) == "<user>3+4?<eos><assistant>Let me think.\n<think>"
    assert prompt(USER) == "<user>3+4?<eos><assistant>"
    assert (
        prompt(USER, BEGUN, USER) == "<user>3+4?<eos><assistant>Let me think.\n<think><eos><user>3+4?<eos><assistant>"
    )


@pytest.mark.parametrize("content", ["", "  \n", None])
def test_an_empty_answer_begins_nothing(content: str | None) -> None:
    assert prompt(USER, {"role": "assistant", "content": content}) == prompt(USER)


def test_calls_of_tools_are_no_answer_that_was_begun() -> None:
    calls = {"role": "assistant", "content": "x", "tool_calls": [{"type": "function"}]}
    assert prompt_arguments([USER, calls]) == ([USER, calls], {"add_generation_prompt": True})


def test_environments_continue_it_too() -> None:
    made = tokenizer()
    chat = Chat(made)
    assert made.decode(chat.prompt([USER, BEGUN]).ids) == prompt(USER, BEGUN)
    assert made.decode(chat.prompt([USER]).ids) == prompt(USER)


def test_a_template_that_drops_it_is_refused() -> None:
    drops = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="task 't' of s: the model's chat template refuses its messages"):
        encode_prompt(Task("t", "s", "r", messages=(USER, BEGUN)), tokenizer(drops))
