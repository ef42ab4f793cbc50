"""Tools of environments, and the calculator."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import environment_contract
from rollover.config import Config
from rollover.config.load import load_config
from rollover.config.recipes import recipe
from rollover.envs.class_environment import ClassEnvironment
from rollover.envs.tools import Call, MalformedCall, read_calls, tool_schemas
from rollover.recipes.calculator import Calculator
from rollover.types import Reward, Rollout, SamplingParams, Task
from rollover.workflows.build import build_workflow
from unit.envs.played import TOKENIZER, add_turn, build, new_rollout, reward_of, told, turn
from unit.workflows.scripted_host import ScriptedHost

# Calls are read in their order, malformed ones with a reason; tools are described, or named with what to mend


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


# The classes of the recipe `calculator`: they keep the contract, and no expression hangs, fails or runs a program


TASK = Task("t", "test", "reward", messages=({"role": "user", "content": "12*34?"},), columns={"answer": "408"})
CONFIG: Config = load_config([recipe("calculator"), {"rollout.max_new_tokens": 1000}]).config


def environment() -> ClassEnvironment:
    return build(CONFIG)


def after(*turns: str) -> Rollout:
    """A rollout with these turns of the policy, and the environment's answers between them."""
    rollout, played = new_rollout(TASK), environment()
    for text in turns[:-1]:
        asyncio.run(told(played, rollout, text))
    add_turn(rollout, turns[-1])
    return rollout


@pytest.mark.parametrize("check", environment_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check) -> None:
    rollouts = [after("[[1+1]]"), after("It is 408."), after("[[1+"), after("[[12*34]]", "408")]
    for sibling, rollout in enumerate(rollouts):
        rollout.sibling = sibling
    asyncio.run(check(environment_contract.Subject(environment, rollouts, len(TOKENIZER))))


def test_it_answers_calls_and_the_tasks_reward_scores() -> None:
    played, rollout = environment(), new_rollout(TASK)
    assert asyncio.run(told(played, rollout, "[[12*34]]")) == ["408"]
    assert asyncio.run(turn(played, rollout, "408")) is None
    assert reward_of(played, rollout).score == -1.0
    assert asyncio.run(told(played, new_rollout(TASK, 1), "[[1/0]] and [[9**9**9]]")) == [
        "error: division by zero",
        "error: the number is too large",
    ]


def test_the_prompt_has_right_examples_before_the_question() -> None:
    played = environment()
    prompt = TOKENIZER.decode(played.prompt(TASK).ids)
    assert prompt.startswith(
        "<|im_start|>system\nTo have an expression computed write it in double brackets: [[12*34]]"
    )
    assert prompt.endswith("<|im_start|>user\n12*34?<|im_end|>\n<|im_start|>assistant\n")
    roles = [part.partition("\n")[0] for part in prompt.split("<|im_start|>")[1:]]
    assert roles == ["system", *["user", "assistant", "tool", "assistant"] * 2, "user", "assistant"]
    for _, asked, answer, said in zip(*[iter(played.user.examples)] * 4, strict=True):
        (call,) = played.format.read(asked["content"])
        assert (
            isinstance(call, Call)
            and calculate(call.arguments["expression"]) == answer["content"]
            and answer["content"] in said["content"]
        )


calculate = Calculator().calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("-7 // 2", "-4"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("7 % 4 / 2", "1.5"),
        ("1e3+.5", "1000.5"),
        ("(-1)**9**50", "-1"),
    ],
)
def test_arithmetic(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9", "9**9**9**9", "(-8)**.5", "9" * 199, "9**99*9**99*9**99", "1e308*10", "-" * 500 + "1",
        "(" * 150 + "1", "", "1+", "__import__('os')", "e", "1 if 1 else 2", "1(2)", "0x10", "1e999",
        "(1).real", "1,2",
        "1\n+1", "٣", "1\x00", "1.5**9999", "0**-1",
    ],
)  # fmt: skip
def test_what_is_no_bounded_arithmetic_is_an_error(expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        calculate(expression)


@given(st.text(st.sampled_from("0123456789+-*/%(). eE"), max_size=60) | st.text())
def test_no_expression_ends_otherwise(expression: str) -> None:
    try:
        assert len(calculate(expression)) < 300
    except (ValueError, ArithmeticError):
        pass


def test_the_agent_has_the_same_prompt_and_calculator() -> None:
    """Of the recipe calculator_agent, which asks over HTTP."""
    pytest.importorskip("uvicorn")
    scored: list[str] = []

    class Rewarder:
        async def score(self, requests: list[Any]) -> list[Reward]:
            scored.extend(request.completion for request in requests)
            return [Reward(1.0)]

        async def close(self) -> None: ...

    config = load_config([recipe("calculator_agent")]).config
    host = ScriptedHost(
        build_workflow(config.workflow, SamplingParams(), Rewarder()),
        lambda before: "It is 408." if before.endswith("408<|im_end|>\n<|im_start|>assistant\n") else "[[12*34]]",
        max_turns=config.workflow.max_turns,
    )
    host.task = replace(TASK, prompt="12*34?", messages=None)
    host.run()
    [rollout] = host.rollouts.values()
    assert TOKENIZER.decode(rollout.prompt.ids) == TOKENIZER.decode(environment().prompt(TASK).ids)
    assert scored == ["It is 408."] and host.episodes.counts["turns/continued"] == 1
    assert {config.model.path, config.train.learning_rate} == {CONFIG.model.path, CONFIG.train.learning_rate}
    assert config.tasks == CONFIG.tasks
