"""Sums and products as reasoning-gym's generators chain_sum and products word and number them, without that package.

One of its dependencies needs a C compiler, which `rollover demo` must not. test_arithmetic.py holds both
to the same problems.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from rollover.suggest import did_you_mean
from rollover.tasks.reasoning_gym import CHUNK_SIZE, check_problem_key, chunk_seed
from rollover.tasks.same import same_of_generator
from rollover.tasks.source import EndlessSource, SourceSetup
from rollover.types import Task

_DEFAULTS = {
    "chain_sum": {"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 4},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 5},
}


def arithmetic_source(setup: SourceSetup) -> ArithmeticSource:
    """The problems of `setup.config.name`."""
    check_problem_key(setup.config.problem_key)
    return ArithmeticSource(setup.config.name, setup.config.params, setup.seed, setup.label, setup.reward)


class ArithmeticSource(EndlessSource):
    """Endless problems; `problem(i)` depends on (name, params, seed, i) only. ValueError for names, parameters and
    values that are none."""

    def __init__(self, name: str, params: Mapping[str, Any], seed: int, label: str, reward: str) -> None:
        if name not in _DEFAULTS:
            raise ValueError(
                f"tasks.sources.name = {name!r}: arithmetic has chain_sum and products{did_you_mean(name, _DEFAULTS)}"
            )
        self.name, self.seed, self.label, self.reward = name, seed, label, reward
        self.same = same_of_generator(name)
        if unknown := [key for key in params if key not in _DEFAULTS[name]]:
            raise ValueError(
                f"tasks.sources.params.{unknown[0]} of {label!r}: {name} has no such parameter, its parameters are"
                f" {', '.join(_DEFAULTS[name])}"
            )
        self.params = {**_DEFAULTS[name], **params}
        for low, high in (("min_terms", "max_terms"), ("min_digits", "max_digits")):
            least, most = self.params[low], self.params[high]
            if not all(type(value) is int for value in (least, most)) or not 1 <= least <= most:
                raise ValueError(
                    f"tasks.sources.params of {label!r}: {low} = {least!r} and {high} = {most!r}: give whole numbers,"
                    " at least 1, the smaller one first"
                )

    def problem(self, index: int) -> Task:
        """Problem number `index` (0, 1, 2, ...) as a plain prompt, without system prompt or instruction."""
        chunk, offset = divmod(index, CHUNK_SIZE)
        draws = random.Random(chunk_seed(self.seed, chunk) + offset)
        num_terms = draws.randint(self.params["min_terms"], self.params["max_terms"])
        num_digits = draws.randint(self.params["min_digits"], self.params["max_digits"])
        least, most = (0 if num_digits == 1 else 10 ** (num_digits - 1)), 10**num_digits - 1
        terms = [draws.randint(least, most) for _ in range(num_terms)]
        result = terms[0]
        if self.name == "chain_sum":
            signs = [draws.choice(["+", "-"]) for _ in terms[1:]]
            for sign, term in zip(signs, terms[1:], strict=True):
                result += term if sign == "+" else -term
            text = " ".join([str(terms[0]), *(f"{sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))])
            question = f"State the final answer to the following arithmetic problem: {text} ="
        else:
            for term in terms[1:]:
                result *= term
            text = " * ".join(map(str, terms))
            question = f"Solve the following multiplication: {text}. Give only the result as your final answer."
        task_id = f"{self.label}/{self.seed}/{index}"
        return Task(task_id, self.label, self.reward, prompt=question, columns={"answer": str(result)})
