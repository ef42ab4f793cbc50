"""The classes of the recipe `calculator`: they keep the contract, and no expression hangs, fails or runs a program."""

from __future__ import annotations

import asyncio
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
from rollover.envs.tools import Call
from rollover.recipes.calculator import Calculator
from rollover.types import Reward, Rollout, SamplingParams, Task
from rollover.workflows.build import build_workflow
from unit.envs.played import TOKENIZER, add_turn, build, new_rollout, reward_of, told, turn
from unit.workflows.scripted_host import ScriptedHost

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
