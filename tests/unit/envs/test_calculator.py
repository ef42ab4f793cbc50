"""The example of an environment with tools: it keeps the contract, and no expression hangs, fails or runs a program."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import environment_contract
from rollover.envs.chat import Chat
from rollover.envs.tools import Call, MalformedCall, read_calls
from rollover.functions import load_function
from rollover.types import Rollout, RolloutState, SamplingParams, Segment, StopReason, Task
from unit.envs import templates

FILE = Path(__file__).parents[3] / "examples" / "environments" / "calculator.py"
make_calculator, calculate, answer, with_tools = (
    load_function(f"{FILE}:{name}", ".") for name in ("Calculator", "calculate", "answer", "with_tools")
)
CHAT = Chat(templates.tokenizer(templates.CHATML))
TASK = Task("t", "test", "reward", messages=({"role": "user", "content": "12*34?"},), columns={"answer": "408"})


def call(expression: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'calculate', 'arguments': {'expression': expression}})}\n</tool_call>"


def add_turn(rollout: Rollout, text: str) -> None:
    ids = [*CHAT.tokenizer(text)["input_ids"], CHAT.end_of_turn]
    arrays = np.array(ids, dtype=np.int32), np.full(len(ids), -1.0, dtype=np.float32)
    rollout.add(Segment(*arrays, 0, SamplingParams(), StopReason.EOS))


def after(*turns: str) -> Rollout:
    """A rollout with these turns of the policy, and the environment's answers between them."""
    rollout = Rollout(0, 0, TASK, [], RolloutState.RUNNING, StopReason.EOS)
    environment = make_calculator(CHAT)
    for i, text in enumerate(turns):
        if i:
            said = asyncio.run(environment.next(rollout))
            assert said is not None
            rollout.add(said)
        add_turn(rollout, text)
    return rollout


@pytest.mark.parametrize("check", environment_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check) -> None:
    rollouts = [after(call("1+1")), after("It is 408."), after("<tool_call>{"), after(call("12*34"), "408")]
    asyncio.run(check(environment_contract.Subject(lambda: make_calculator(CHAT), rollouts)))


def test_it_answers_calls_and_scores_the_last_turn() -> None:
    def score(*turns: str) -> tuple[float, dict[str, float]]:
        (reward,) = asyncio.run(make_calculator(CHAT).score([after(*turns)]))
        return reward.score, reward.extras

    rollout = after(call("12*34"), "408")
    said = CHAT.tokenizer.decode(rollout.segments[1].token_ids)
    assert said == "\n<|im_start|>tool\n408<|im_end|>\n<|im_start|>assistant\n"
    assert score(call("12*34"), "It is 408.") == (1.0, {"calls": 1, "failed_calls": 0})
    assert score(call("12*34") + call("1/0") + "<tool_call>", call("2"), "4080") == (
        0.0,
        {"calls": 4, "failed_calls": 2},
    )
    assert score(call("400+408"))[0] == 0.0, "a call is no answer"
    assert score(call("12*34")) == (0.0, {"calls": 0, "failed_calls": 0}), "the tool's answer is not the policy's"
    (reward,) = asyncio.run(make_calculator(CHAT).score([Rollout(0, 0, TASK)]))
    assert reward.score == 0.0, "without a token"


def test_it_ends_after_its_last_turn() -> None:
    rollout = after(*[call("1+1")] * 4)
    assert asyncio.run(make_calculator(CHAT).next(rollout)) is None


def test_the_prompt_tells_of_the_tool() -> None:
    task = with_tools(Task("t", "test", "reward", prompt="12*34?"), 0)
    roles = ["system", "user", "assistant", "tool", "assistant", "user"]
    assert task.prompt is None and [m["role"] for m in task.messages] == roles
    assert '"name": "calculate"' in task.messages[0]["content"] and task.messages[-1]["content"] == "12*34?"
    system = {"role": "system", "content": "Be brief."}
    task = with_tools(Task("t", "test", "reward", messages=(system, {"role": "user", "content": "12*34?"})), 0)
    assert [m["role"] for m in task.messages] == roles and task.messages[0]["content"].startswith(
        "Be brief.\n\nYou can"
    )
    (call,) = read_calls(task.messages[2]["content"])
    assert answer(call) == (task.messages[3]["content"], True), "the example is right"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Call("calculate", {"expression": "12 * (3 + 4)"}), "84"),
        (MalformedCall("<tool_call>", "it is cut off"), "error: the call cannot be read: it is cut off"),
        (Call("compute", {}), "error: there is no tool compute, only calculate"),
        (Call("calculate", {}), "error: missing a required argument: 'expression'"),
        (Call("calculate", {"expression": "1", "digits": "3"}), "error: got an unexpected keyword argument 'digits'"),
        (Call("calculate", {"expression": 12}), "error: expression must be a text"),
        (Call("calculate", {"expression": "1/0"}), "error: division by zero"),
    ],
)
def test_what_goes_wrong_is_told(given: Call | MalformedCall, told: str) -> None:
    assert answer(given) == (told, not told.startswith("error"))


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
def test_no_expression_fails_the_rollout(expression: str) -> None:
    told, _ = answer(Call("calculate", {"expression": expression}))
    assert told and len(told) < 300
