"""A call continues a Rollout exactly where it has all messages of it, as they were returned, and new ones."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.types import Prompt
from rollover.workflows.conversations import Break, Conversation, Match, canonical, match, text_of
from rollover.workflows.turns import turn_key

OPENING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]
ANSWER = {"role": "assistant", "content": "4"}
MORE = {"role": "user", "content": "And 3+3?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def after(answer: dict[str, Any] = ANSWER, key: str = "0-0", tools: list[Any] | None = None) -> Conversation:
    return Conversation.opened(key, OPENING, tools or []).with_answer(answer)


GROWN = after().with_call([*OPENING, ANSWER, MORE])
GOES_ON = [*OPENING, ANSWER, MORE]


@pytest.mark.parametrize(
    ("messages", "tools", "conversations", "expected"),
    [
        (OPENING, [], [], Match()),
        (GOES_ON, [], [after()], Match("0-0", (MORE,))),
        (GOES_ON, [], [after(key="0-0"), after(key="0-0.1")], Match("0-0", (MORE,))),  # the oldest of equal ones
        (GOES_ON, [TOOL], [after(tools=[copy.deepcopy(TOOL)])], Match("0-0", (MORE,))),
        ([MORE], [], [after()], Match(reason=Break.HISTORY)),
        ([*OPENING, {"role": "assistant", "content": "5"}, MORE], [], [after()], Match(reason=Break.HISTORY)),
        ([*GOES_ON, {"role": "assistant", "content": "made up"}, MORE], [], [after()], Match(reason=Break.HISTORY)),
        (OPENING, [], [after()], Match(reason=Break.BRANCH)),
        ([*OPENING, ANSWER], [], [after()], Match(reason=Break.BRANCH)),
        ([*OPENING, ANSWER, {"role": "user", "content": "Sure?"}], [], [GROWN], Match(reason=Break.BRANCH)),
        (
            [*OPENING, ANSWER, {"role": "user", "content": "?"}],
            [],
            [GROWN.with_answer(ANSWER)],
            Match(reason=Break.BRANCH),
        ),
        (GOES_ON, [TOOL], [after()], Match(reason=Break.TOOLS)),
        # The reason is that of the nearest conversation.
        (GOES_ON, [], [after(tools=[TOOL]), Conversation.opened("far", [MORE], [])], Match(reason=Break.TOOLS)),
    ],
)
def test_match_of_a_call_and_conversations(messages: Any, tools: Any, conversations: Any, expected: Match):
    assert match(messages, tools, conversations) == expected


def test_match_follows_neither_template_nor_unfinished_turn():
    found = match(GOES_ON, [], [after()], can_follow=lambda role: role != "user")
    assert found == Match(reason=Break.TEMPLATE)
    assert match([*OPENING, ANSWER], [], [Conversation.opened("0-0", OPENING, [])]).key is None


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


@settings(max_examples=30)
@given(st.lists(assistants(), min_size=1, max_size=4), st.data())
def test_reformatted_messages_continue_the_rollout(turns: list[Any], data: st.DataObject):
    conversation, messages = Conversation.opened("0-0", OPENING, []), list(OPENING)
    for turn in turns[:-1]:
        messages = [*messages, turn, {"role": "tool", "content": data.draw(TEXTS), "tool_call_id": "x"}]
        conversation = conversation.with_answer(turn).with_call(messages)
    conversation = conversation.with_answer(turns[-1])
    sent = [rewritten(m) if m["role"] == "assistant" else m for m in [*messages, turns[-1]]]
    assert match([*sent, MORE], [], [conversation]) == Match("0-0", (MORE,))


@given(assistants(), assistants())
def test_what_the_policy_did_not_say_is_another_history(said: dict[str, Any], sent: dict[str, Any]):
    found = match([*OPENING, sent, MORE], [], [after(said)])
    assert (found.key == "0-0") == (canonical([said]) == canonical([sent]))
    if found.key is None:
        assert found.reason is not None


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
