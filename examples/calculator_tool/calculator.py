"""A calculator that the policy calls before it answers: the class, and how a call is written."""

import re
from typing import Any

from rollover.envs.tools import Call
from rollover.recipes.arithmetic import value_of  # walks the expression: what a model wrote is never run


def turns(question: str, expression: str, value: str) -> list[dict[str, str]]:
    said = [question, f"[[{expression}]]", value, f"The answer is {value}"]
    roles = ["user", "assistant", "tool", "assistant"]
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]


class Calculator:
    # Worked examples before the question: without them a small model never calls a tool, and nothing can be learned.
    examples = [*turns("What is 12*34?", "12*34", "408"), *turns("What is 65*87?", "65*87", "5655")]

    def reset(self) -> None:
        self.num_calls = 0

    def calculate(self, expression: str) -> str:
        """The value of an arithmetic expression.

        Args:
            expression: numbers, parentheses and + - * / // % **, such as 12*(3+4)
        """
        self.num_calls += 1
        return value_of(expression)

    def snapshot(self) -> dict[str, int]:  # after a kill another object goes on from what this returned
        return {"num_calls": self.num_calls}

    def restore(self, state: dict[str, int]) -> None:
        self.num_calls = state["num_calls"]


class Brackets:
    """[[12*34]] calls the calculator: far easier for a small model than a JSON object."""

    def definitions(self, schemas: Any) -> str:
        return "To have an expression computed write it in double brackets: [[12*34]]"

    def read(self, text: str) -> list[Call]:
        return [Call("calculate", {"expression": found}) for found in re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL)]
