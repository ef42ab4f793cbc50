"""A calculator that a policy calls before it answers: the class, how a call is written, and the problems.

`rollover train calculator` runs it; docs/agents.md says what such a class may have. Copy it for tools of your own.
What a model wrote is never run: an expression's syntax tree is walked, and sizes are bounded (`9**9**9`).
"""

from __future__ import annotations

import ast
import math
import operator
import random
import re
from collections.abc import Callable
from typing import Any

from rollover.envs.tools import Call
from rollover.tasks.source import SourceSetup
from rollover.types import Task

MAX_CHARS, MAX_BITS = 200, 256  # of an expression; of every number in it and on the way to its value


class Calculator:
    # Worked examples, before the question: without one small models never call a tool, and nothing can be learned.
    examples = (
        {"role": "user", "content": "What is 12*34?"},
        {"role": "assistant", "content": "[[12*34]]"},
        {"role": "tool", "content": "408"},
        {"role": "assistant", "content": "The answer is 408"},
        {"role": "user", "content": "What is 65*87?"},
        {"role": "assistant", "content": "[[65*87]]"},
        {"role": "tool", "content": "5655"},
        {"role": "assistant", "content": "The answer is 5655"},
    )

    def reset(self) -> None:
        """Nothing is kept from call to call. The reward is that of the task: the last number is the answer."""

    def calculate(self, expression: str) -> str:
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


class Brackets:
    """[[12*34]] calls the calculator: far easier for a small model than a JSON object."""

    def definitions(self, schemas: Any) -> str:
        return "To have an expression computed write it in double brackets: [[12*34]]"

    def read(self, text: str) -> list[Call]:
        return [Call("calculate", {"expression": found}) for found in re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL)]


class Products:
    """Products of two numbers of two digits, without an end. `setup`: see tasks/source.py."""

    def __init__(self, setup: SourceSetup) -> None:
        self.setup = setup

    def problem(self, index: int) -> Task:
        draw = random.Random(f"{self.setup.seed}/{index}")
        one, other = sorted((draw.randint(10, 99), draw.randint(10, 99)))  # 34*12 is no other problem than 12*34
        text, columns = f"What is {one}*{other}?", {"answer": str(one * other)}
        label = self.setup.label
        return Task(f"{label}/{self.setup.seed}/{index}", label, self.setup.reward, prompt=text, columns=columns)


# Arithmetic by walking the syntax tree

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
