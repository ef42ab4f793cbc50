"""The text of an answer, with and without its special tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollover.envs.chat import answer_decoder
from rollover.types import Prompt, Rollout, SamplingParams, Segment, StopReason, Task
from rollover.workflows.conversations import Call, Chats, Conversations
from unit.envs import templates

ANSWER = "<think>3</think><|start_header_id|>4"


def tokenizer(template: str = templates.CHATML) -> Any:
    made = templates.tokenizer(template)
    made.add_special_tokens({"additional_special_tokens": [*templates.SPECIAL, "<think>", "</think>"]})
    made.eos_token, made.pad_token = "<|eot_id|>", "<|begin_of_text|>"
    return made


def ids_of(made: Any, text: str) -> list[int]:
    return made.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "keep", "text"),
    [
        (templates.CHATML, False, "34"),
        (templates.CHATML, True, ANSWER),
        (templates.NO_END, True, f"{ANSWER}<|im_end|>"),
        (None, True, f"{ANSWER}<|im_end|>"),
    ],
)
def test_kept_text_lacks_the_ends_alone(template: str, keep: bool, text: str) -> None:
    made = tokenizer(template)
    ids = ids_of(made, f"{ANSWER}<|im_end|><|eot_id|><|begin_of_text|>")
    assert answer_decoder(made, keep)(ids) == text


@pytest.mark.parametrize(("keep", "text"), [(False, "34"), (True, ANSWER)])
def test_replies_to_prompts_follow_the_setting(keep: bool, text: str) -> None:
    made = tokenizer()
    conversations, call = Conversations(Chats(made, keep_special_tokens=keep)), Call(prompt="1+2=")
    rollout = Rollout(0, 0, Task("t", "s", "", prompt="1+2="), prompt=Prompt.of(ids_of(made, "1+2=")))
    ids = np.array(ids_of(made, f"{ANSWER}<|eot_id|>"), np.int32)
    rollout.add(Segment(ids, np.zeros(len(ids), np.float32), 0, SamplingParams(), StopReason.EOS))
    rollout.stop_reason = StopReason.EOS
    conversations.on_open(rollout.rollout_id, call)
    assert conversations.on_turn(rollout).text == text
