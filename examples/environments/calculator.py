"""A calculator that the policy calls, as often as it likes within MAX_TURNS, before it answers. Copy it for your tools.

    rollout.environment = "examples/environments/calculator.py:make"
    tasks.before_produce = "examples/environments/calculator.py:with_tools"

A task is a question with the column `answer`. The score is 1 if that is the last number of the policy's last turn,
else 0. What goes wrong at a call is told to the policy, and never fails the rollout.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
import re
from collections.abc import Callable
from dataclasses import replace

from rollover.envs.build import EnvironmentSetup
from rollover.envs.chat import Chat, sampled_turns
from rollover.envs.protocol import written
from rollover.envs.tools import Call, MalformedCall, definitions, read_calls, tool_schemas, with_system_text
from rollover.types import Reward, Rollout, Segment, Task

MAX_TURNS = 4
MAX_CHARS, MAX_BITS = 200, 256  # of an expression; of every number in it and on the way to its value
# A worked example: without one small models never call a tool, and nothing can be learned.
EXAMPLE = (
    {"role": "user", "content": "What is 12*34?"},
    {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12*34"}}\n</tool_call>',
    },
    {"role": "tool", "content": "408"},
    {"role": "assistant", "content": "The answer is 408"},
)


def calculate(expression: str) -> str:
    """The value of an arithmetic expression.

    Args:
        expression: numbers, parentheses and + - * / // % **, such as 12*(3+4)
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"an expression has at most {MAX_CHARS} characters")
    if bad := re.search(r"[^\d+\-*/%().eE \t]", expression, re.ASCII):
        raise ValueError(f"{bad[0]!r} has no place in an arithmetic expression")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):  # the last two where it is nested too deeply
        raise ValueError("it is no arithmetic expression") from None
    value = evaluate(tree.body)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


TOOLS = {tool.__name__: tool for tool in (calculate,)}


def with_tools(task: Task, version: int) -> Task:
    """The task with the tools' definitions in its system message, and the worked example before its last message."""
    *before, question = task.messages or ({"role": "user", "content": task.content},)
    messages = with_system_text([*before, *EXAMPLE, question], definitions(tool_schemas(TOOLS.values())))
    return replace(task, messages=tuple(messages), prompt=None)


def make(setup: EnvironmentSetup) -> Calculator:
    chat = Chat(setup.tokenizer)
    chat.require("tool")
    return Calculator(chat)


class Calculator:
    """Everything is read from the tokens of the rollout, so a turn may be asked for again after a kill."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    async def next(self, rollout: Rollout) -> Segment | None:
        turns = sampled_turns(rollout)
        calls = self.calls(turns[-1])
        if not calls or len(turns) >= MAX_TURNS:
            return None
        results = [{"role": "tool", "content": answer(call)[0]} for call in calls]
        return written(rollout, self.chat.continuation(turns[-1], results))

    async def score(self, rollouts: list[Rollout]) -> list[Reward]:
        return [self.reward(rollout) for rollout in rollouts]

    def scores_singly(self, task: Task) -> bool:
        return True

    def calls(self, turn: list[int]) -> list[Call | MalformedCall]:
        return read_calls(self.chat.text(turn))

    def reward(self, rollout: Rollout) -> Reward:
        turns = sampled_turns(rollout)
        numbers = re.findall(r"-?\d+(?:\.\d+)?", self.chat.text(turns[-1])) if turns else []
        right = bool(turns) and not self.calls(turns[-1]) and numbers[-1:] == [str(rollout.task.columns["answer"])]
        calls = [call for turn in turns[:-1] for call in self.calls(turn)]
        failed = sum(not answer(call)[1] for call in calls)
        return Reward(float(right), {"calls": len(calls), "failed_calls": failed})


def answer(call: Call | MalformedCall, tools: dict[str, Callable[..., str]] = TOOLS) -> tuple[str, bool]:
    """What the policy is told of its call, and whether it was answered."""
    if isinstance(call, MalformedCall):
        return f"error: the call cannot be read: {call.why}", False
    if call.name not in tools:
        return f"error: there is no tool {call.name[:50]}, only {', '.join(tools)}", False
    tool = tools[call.name]
    try:
        arguments = inspect.signature(tool).bind(**call.arguments).arguments
    except TypeError as error:
        return f"error: {error}"[:200], False
    if wrong := [name for name, value in arguments.items() if not isinstance(value, str)]:
        return f"error: {', '.join(wrong)} must be a text", False
    try:
        return tool(**arguments), True
    except (ValueError, ArithmeticError) as error:
        return f"error: {error}", False


# Arithmetic by walking the syntax tree: an eval of what a model wrote would run any program.

Number = int | float
OPERATORS: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(node: ast.expr) -> Number:
    """The value of an expression of numbers. ValueError and ArithmeticError in words for the policy."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return bounded(value)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign):
            value = evaluate(node.operand)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(op=ast.Pow()):
            return power(evaluate(node.left), evaluate(node.right))
        case ast.BinOp() if type(node.op) in OPERATORS:
            return bounded(OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right)))
    raise ValueError("it is no arithmetic expression")


def power(base: Number, exponent: Number) -> Number:
    """Its size is known before it is computed: 9**9**9 would take all the memory there is."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if abs(base) > 1 and base.bit_length() * exponent > 2 * MAX_BITS:
            raise ValueError("the number is too large")
        return bounded(base**exponent)
    value = float(base) ** float(exponent)
    if isinstance(value, complex):
        raise ValueError("it has no real value")
    return bounded(value)


def bounded(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ValueError("the number is too large")
    elif not math.isfinite(value):
        raise ValueError("the number is too large")
    return value
