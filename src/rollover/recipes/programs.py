"""Small programming tasks with tests, for the recipe `code` (docs/rewards.md). Copy it for your own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from rollover.tasks.source import SourceSetup
from rollover.types import Task

_NUM_TESTS = 8
Function = Callable[[Any, int], Any]
# The result of f(x) in words with a number k, the same as a function, and the kind of x.
_KINDS: tuple[tuple[str, Function, str], ...] = (
    ("x plus {k}", lambda x, k: x + k, "number"),
    ("x minus {k}", lambda x, k: x - k, "number"),
    ("x times {k}", lambda x, k: x * k, "number"),
    ("the remainder of x divided by {k}", lambda x, k: x % k, "number"),
    ("x squared plus {k}", lambda x, k: x * x + k, "number"),
    ("the larger of x and {k}", lambda x, k: max(x, k), "number"),
    ("True if x is greater than {k}, else False", lambda x, k: x > k, "number"),
    ("the text x repeated {k} times", lambda x, k: x * k, "text"),
    ("the text x with the number {k} at its end", lambda x, k: f"{x}{k}", "text"),
    ("the sum of the list x plus {k}", lambda x, k: sum(x) + k, "list"),
    ("how often {k} is in the list x", lambda x, k: x.count(k), "list"),
    ("the list x with every number times {k}", lambda x, k: [each * k for each in x], "list"),
)


class Programs:
    """Endless tasks such as "Write a Python function f(x) that returns x plus 7". `setup`: see tasks/source.py."""

    def __init__(self, setup: SourceSetup) -> None:
        self.setup = setup

    def problem(self, index: int) -> Task:
        draw = random.Random(f"{self.setup.seed}/{index}")
        words, function, kind = draw.choice(_KINDS)
        k = draw.randint(2, 40)
        inputs = [_argument(draw, kind, k) for _ in range(_NUM_TESTS)]
        tests = {
            "fn_name": "f",
            "inputs": [json.dumps(x) for x in inputs],
            "outputs": [json.dumps(function(x, k)) for x in inputs],
        }
        text = f"Write a Python function f(x) that returns {words.format(k=k)}."
        label = self.setup.label
        columns = {"tests": tests}
        return Task(f"{label}/{self.setup.seed}/{index}", label, self.setup.reward, prompt=text, columns=columns)


def _argument(draw: random.Random, kind: str, k: int) -> Any:
    if kind == "text":
        return "".join(draw.choices("abcdef", k=draw.randint(1, 4)))
    near = k + draw.randint(-9, 9)
    return near if kind == "number" else [draw.choice((k, near)) for _ in range(draw.randint(1, 5))]
