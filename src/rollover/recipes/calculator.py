"""A calculator as a tool of a policy: the class, its call format, and the tasks.

`rollover train calculator` runs it; docs/agents.md describes such classes. Copy it for your own tools.
"""

from __future__ import annotations

import random
import re
from typing import Any

from rollover.envs.tools import Call
from rollover.recipes.arithmetic import value_of
from rollover.tasks.source import SourceSetup
from rollover.types import Task


class Calculator:
    # Examples before the question: without them small models never call a tool, so there is nothing to reinforce.
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
        """Do nothing: the tool has no state. The task's reward takes the last number as the answer."""

    def calculate(self, expression: str) -> str:
        """The value of an arithmetic expression.

        Args:
            expression: numbers, parentheses and + - * / // % **, such as 12*(3+4)
        """
        return value_of(expression)


class Brackets:
    """Call format [[12*34]], which is much easier for a small model than JSON."""

    def definitions(self, schemas: Any) -> str:
        return "To have an expression computed write it in double brackets: [[12*34]]"

    def read(self, text: str) -> list[Call]:
        return [Call("calculate", {"expression": found}) for found in re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL)]


class Problems:
    """Endless tasks such as 604*234-378*85. `setup`: see tasks/source.py."""

    def __init__(self, setup: SourceSetup) -> None:
        self.setup = setup

    def problem(self, index: int) -> Task:
        draw = random.Random(f"{self.setup.seed}/{index}")
        expression = f"{_number(draw, 3)}*{_number(draw, 3)}{draw.choice('+-')}{_number(draw, 3)}*{_number(draw, 2)}"
        text, columns = f"What is {expression}?", {"answer": value_of(expression)}
        label = self.setup.label
        return Task(f"{label}/{self.setup.seed}/{index}", label, self.setup.reward, prompt=text, columns=columns)


def _number(draw: random.Random, digits: int) -> int:
    return draw.randint(10 ** (digits - 1), 10**digits - 1)
