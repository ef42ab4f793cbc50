"""Calls are read in their order, malformed ones with a reason; tools are described, or named with what to mend."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.envs.tools import Call, MalformedCall, read_calls, tool_schemas

ONE = {"name": "add", "arguments": {"a": 2, "b": [1, {"c": None}]}}
TWO = {"name": "find", "parameters": {"text": "</tool_call> <tool_call>"}}


def hermes(*calls: Any) -> str:
    return "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def test_hermes_calls_are_read_in_order_with_text_around_them() -> None:
    text = f"First I add. {hermes(ONE)} then {hermes(TWO, ONE)} so."
    one, two = Call("add", ONE["arguments"]), Call("find", TWO["parameters"])
    assert read_calls(text) == [one, two, one]
    assert read_calls("no call: {}") == read_calls("") == []


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ONE) + json.dumps(TWO),
        f"\n{json.dumps(ONE)}; {json.dumps(TWO)}\n",
        json.dumps([ONE, TWO]),
        f"```json\n[{json.dumps(ONE)},\n{json.dumps(TWO)}]\n```",
    ],
)
def test_json_calls_are_read_in_order(text: str) -> None:
    assert read_calls(text, "json") == [Call("add", ONE["arguments"]), Call("find", TWO["parameters"])]
    assert read_calls("It is " + text, "json") == []


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ("{'name': 'add'}", "it is no JSON: Expecting property name"),
        ("", "it is no JSON: Expecting value"),
        ('["add"]', "a call is a JSON object"),
        ('{"arguments": {}}', 'its "name" is no text'),
        ('{"name": 3, "arguments": {}}', 'its "name" is no text'),
        ('{"name": "", "arguments": {}}', 'its "name" is no text'),
        ('{"name": "add"}', 'its "arguments" are no JSON object'),
        ('{"name": "add", "arguments": "2"}', 'its "arguments" are no JSON object'),
        ('{"name": "add", "name": "find", "arguments": {}}', "a key of an object is there twice"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no JSON"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "JSON compliant"),
        ('{"name": "add", "arguments": {"a": %s}}' % ("9" * 5000), "more than 1,000 digits"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "half a character"),
        ('{"name": "add", "arguments": {"a": "\ud800"}}', "half a character"),
        ('{"name": "add", "arguments": {"a": %s}}' % ("[" * 100_000), "nested too deeply"),
        (json.dumps(ONE) + " please", "</tool_call> does not follow"),
    ],
)
def test_a_malformed_call_says_why_and_the_next_one_is_read(inside: str, why: str) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    malformed, call = read_calls(text + hermes(ONE))
    assert isinstance(malformed, MalformedCall) and why in malformed.why and malformed.text == text
    assert call == Call("add", ONE["arguments"])
    if inside.startswith("{") and "please" not in inside:
        (alone,) = read_calls(inside, "json")
        assert isinstance(alone, MalformedCall) and why in alone.why


def test_a_call_that_was_cut_off_is_malformed() -> None:
    call, cut = read_calls(hermes(ONE) + hermes(ONE)[:-3])
    assert call == Call("add", ONE["arguments"]) and cut == MalformedCall(hermes(ONE)[:-3], "</tool_call> is missing")
    (cut,) = read_calls(json.dumps(ONE)[:-1], "json")
    assert isinstance(cut, MalformedCall)


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'xml' is none of hermes, json"):
        read_calls("", "xml")


PARTS = [
    "<tool_call>",
    "</tool_call>",
    *'{}[],:- 0"',
    "\\",
    '"name"',
    '"arguments"',
    "\ud800",
    '"\\ud800"',
    "```",
    "1e999",
]
TEXTS = st.lists(st.sampled_from([*PARTS, hermes(ONE), json.dumps(TWO)]), max_size=20)
ANY_TEXT = st.text(st.characters(exclude_categories=[])) | TEXTS.map("".join)


@given(ANY_TEXT, st.sampled_from(["hermes", "json"]))
def test_no_text_raises(text: str, tool_format: str) -> None:
    for call in read_calls(text, tool_format):
        if isinstance(call, Call):
            assert json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode() and call.name
        else:
            assert call.why and call.text in text


@given(st.text(), st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.booleans())), ANY_TEXT)
def test_what_is_well_formed_is_read_whatever_stands_before_it(name: str, arguments: dict, before: str) -> None:
    before = before.replace("<tool_call>", "")
    call = Call(name or "x", arguments)
    assert read_calls(f"{before} {hermes({'name': call.name, 'arguments': arguments})}")[-1] == call


# Schemas.


def no_types(expression):
    """The value.

    Args:
        expression: such as 1+1
    """


def no_words(expression: str) -> str: ...


def no_words_for_one(expression: str, digits: int) -> str:
    """The value.

    Args:
        expression: such as 1+1
    """
    return ""


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        (no_types, "the tool no_types has no complete types: .*expression.*Annotate every parameter"),
        (no_words, "the tool no_words is not described: .*Give it a docstring"),
        (no_words_for_one, "the tool no_words_for_one is not described: .*digits.*below 'Args:'"),
    ],
)
def test_a_tool_without_types_or_words_is_named(tool: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        tool_schemas([tool])


def test_a_method_is_a_tool_and_names_are_told_apart() -> None:
    class Shelf:
        def find(self, text: str, most: int = 3) -> str:
            """Books.

            Args:
                text: of the title
                most: how many
            """
            return text * most

    (schema,) = tool_schemas([Shelf().find])
    assert schema["function"]["name"] == "find" and list(schema["function"]["parameters"]["properties"]) == [
        "text",
        "most",
    ]
    assert schema["function"]["parameters"]["required"] == ["text"]
    with pytest.raises(ValueError, match="two tools have the name find"):
        tool_schemas([Shelf().find, Shelf().find])
