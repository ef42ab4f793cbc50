"""Arithmetic for a policy: the value of an expression from a model. Standard library only.

Model output is never executed: the syntax tree is walked, and sizes are bounded (`9**9**9`).
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

MAX_CHARS, MAX_BITS = 200, 256  # per expression; per number, intermediate ones included
Number = int | float
OPERATORS: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def value_of(expression: str) -> str:
    """Return the value of an expression as text; ValueError and ArithmeticError have messages for the policy."""
    if len(expression) > MAX_CHARS:
        raise ValueError(f"an expression has at most {MAX_CHARS} characters")
    if bad := re.search(r"[^\d+\-*/%().eE \t]", expression, re.ASCII):
        raise ValueError(f"{bad[0]!r} has no place in an arithmetic expression")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):  # the last two for deep nesting
        raise ValueError("it is no arithmetic expression") from None
    value = evaluate(tree.body)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def evaluate(node: ast.expr) -> Number:
    """Return the value of a syntax tree; ValueError and ArithmeticError have messages for the policy."""
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
    # The size is checked before the computation: 9**9**9 would take all memory.
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
