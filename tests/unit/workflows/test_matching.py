"""A call continues a Rollout exactly where it has all messages of it, as they were returned, and new ones."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.types import Prompt
from rollover.workflows.matching import Break, Conversation, Match, canonical, match, text_of, turn_key

OPENING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]
ANSWER = {"role": "assistant", "content": "4"}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": [1, 2.5]}'}},
    ],
}
MORE = {"role": "user", "content": "And 3+3?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def after(answer: dict[str, Any] = ANSWER, key: str = "0-0", tools: list[Any] | None = None) -> Conversation:
    return Conversation.opened(key, OPENING, tools or []).answered(answer)


def test_the_first_call_of_a_trajectory_opens_a_rollout_without_a_reason():
    assert match(OPENING, [], []) == Match()


def test_a_call_that_goes_on_continues():
    assert match([*OPENING, ANSWER, MORE], [], [after()]) == Match("0-0", (MORE,))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "Other."}], Break.HISTORY),
        ([*OPENING, {"role": "assistant", "content": "5"}, MORE], Break.HISTORY),
        ([OPENING[1], ANSWER, MORE], Break.HISTORY),
        ([*OPENING, ANSWER, MORE, {"role": "assistant", "content": "made up"}, MORE], Break.HISTORY),
        (OPENING, Break.BRANCH),
        ([*OPENING, ANSWER], Break.BRANCH),
    ],
)
def test_why_a_call_opens_a_rollout(messages: list[Any], reason: Break):
    assert match(messages, [], [after()]).reason is reason


def test_the_later_of_two_extensions_is_a_branch():
    grown = after().asked([*OPENING, ANSWER, MORE])
    other = [*OPENING, ANSWER, {"role": "user", "content": "Sure?"}]
    assert match(other, [], [grown]).reason is Break.BRANCH
    assert match(other, [], [grown.answered({"role": "assistant", "content": "6"})]).reason is Break.BRANCH


def test_a_turn_under_way_is_not_gone_on_from():
    assert match([*OPENING, ANSWER], [], [Conversation.opened("0-0", OPENING, [])]).key is None


def test_other_tools_open_a_rollout():
    assert match([*OPENING, ANSWER, MORE], [TOOL], [after()]).reason is Break.TOOLS
    assert match([*OPENING, ANSWER, MORE], [copy.deepcopy(TOOL)], [after(tools=[TOOL])]).key == "0-0"


def test_a_template_that_cannot_follow_opens_a_rollout():
    found = match([*OPENING, ANSWER, MORE], [], [after()], can_follow=lambda role: role != "user")
    assert found == Match(reason=Break.TEMPLATE)


def test_of_equal_rollouts_the_oldest_goes_on():
    assert match([*OPENING, ANSWER, MORE], [], [after(key="0-0"), after(key="0-0.1")]).key == "0-0"


def test_the_reason_is_that_of_the_nearest_rollout():
    near, far = after(key="near", tools=[TOOL]), Conversation.opened("far", [MORE], []).answered(ANSWER)
    assert match([*OPENING, ANSWER, MORE], [], [near, far]).reason is Break.TOOLS


def rewritten(message: dict[str, Any]) -> dict[str, Any]:
    """As a client may send it: other ids, spaces and order of keys, keys of its own, parts of text, no content."""
    out: dict[str, Any] = {"refusal": None, "annotations": [], **message}
    if out["content"]:
        out["content"] = [{"type": "text", "text": out["content"]}]
    else:
        del out["content"]
    if "tool_calls" in out:
        out["tool_calls"] = [
            {
                "function": {
                    "arguments": json.dumps(json.loads(c["function"]["arguments"]), indent=1, sort_keys=True),
                    "name": c["function"]["name"],
                },
                "id": "other",
            }
            for c in out["tool_calls"]
        ]
    return out


TEXTS = st.text(max_size=8)
JSONS = st.dictionaries(TEXTS, st.integers() | TEXTS | st.booleans() | st.lists(st.floats(-9, 9), max_size=2))


@st.composite
def assistants(draw: st.DrawFn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
    calls = draw(st.lists(st.tuples(TEXTS, JSONS), max_size=2))
    if calls:
        message["tool_calls"] = [
            {"id": str(i), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


@given(st.lists(assistants(), min_size=1, max_size=4), st.data())
def test_a_client_that_writes_messages_its_own_way_keeps_its_rollout(turns: list[Any], data: st.DataObject):
    conversation, messages = Conversation.opened("0-0", OPENING, []), list(OPENING)
    for turn in turns[:-1]:
        messages = [*messages, turn, {"role": "tool", "content": data.draw(TEXTS), "tool_call_id": "x"}]
        conversation = conversation.answered(turn).asked(messages)
    conversation = conversation.answered(turns[-1])
    sent = [rewritten(m) if m["role"] == "assistant" else m for m in [*messages, turns[-1]]]
    assert match([*sent, MORE], [], [conversation]) == Match("0-0", (MORE,))


@given(assistants(), assistants())
def test_what_the_policy_did_not_say_is_another_history(said: dict[str, Any], sent: dict[str, Any]):
    found = match([*OPENING, sent, MORE], [], [after(said)])
    assert (found.key == "0-0") == (canonical([said]) == canonical([sent]))
    if found.key is None:
        assert found.reason is not None


@given(st.integers(0, 3), st.integers(0, 3))
def test_any_cut_of_the_history_opens_a_rollout(start: int, end: int):
    turns = [*OPENING, ANSWER, MORE]
    conversation = Conversation.opened("0-0", turns, []).answered(CALLING)
    cut = [*turns, CALLING][start : 5 - end]
    new = {"role": "tool", "content": "4"}
    assert (match([*cut, new], [], [conversation]).key == "0-0") == (start == end == 0)


def test_a_content_that_is_no_text_is_refused():
    assert text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    with pytest.raises(ValueError, match="parts of the types text"):
        text_of([{"type": "image_url", "image_url": {}}])


@given(st.lists(st.integers(0, 99), max_size=4), st.integers(0, 2), st.sampled_from(["policy", "judge"]))
def test_turn_keys_tell_questions_apart_and_are_stable(prompt: list[int], occurrence: int, role: str):
    told = Prompt.of(prompt)
    key = turn_key(role, told, 5, ["]]"], occurrence)
    assert key == turn_key(role, Prompt.of(prompt), 5, ("]]",), occurrence)
    others = [
        turn_key(role + "x", told, 5, ["]]"], occurrence),
        turn_key(role, Prompt.of([*prompt, 1]), 5, ["]]"], occurrence),
        turn_key(role, told, 6, ["]]"], occurrence),
        turn_key(role, told, None, ["]]"], occurrence),
        turn_key(role, told, 5, [], occurrence),
        turn_key(role, told, 5, ["]]"], occurrence + 1),
    ]
    assert key not in others and 0 <= key < 2**64
