"""Generated tasks: reasoning-gym's generators, and `arithmetic`, which needs no package. Endless and seeded.

`arithmetic` writes and numbers the problems of chain_sum and products exactly like reasoning-gym (tests/unit/tasks/
test_arithmetic.py compares them): a dependency of that package needs a C compiler, which `rollover demo` must not.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rollover.suggest import alike, did_you_mean
from rollover.tasks.source import EndlessSource, FailedProblem, SourceSetup
from rollover.tasks.split import generator_comparison
from rollover.types import Task

# Some generators prepare their whole virtual size when created, and some refuse a large one. So problem i is entry
# i % CHUNK_SIZE of a dataset with its own seed.
CHUNK_SIZE = 1000
_FIRST_PROBLEMS = 10  # tried before a run; if all fail, the parameters are wrong


def generator_source(setup: SourceSetup) -> ReasoningGymSource:
    """Build the generator `setup.config.name`."""
    config = setup.config
    check_problem_key(config.problem_key)
    return ReasoningGymSource(config.name, config.params, setup.seed, setup.label, setup.reward)


def check_problem_key(key: str) -> None:
    """Raise ValueError for a column: generated problems have none to compare."""
    if key and ":" not in key:
        raise ValueError(
            f"tasks.sources.problem_key = {key!r}: a generator has no columns. Name a function, or remove it"
        )


class ReasoningGymSource(EndlessSource):
    """Endless problems of one generator; `problem(i)` depends on (name, params, seed, i) only.

    The package is imported on first use. ValueError if it is missing, the name is unknown, the generator refuses the
    parameters, or all of its first problems fail.
    """

    def __init__(self, name: str, params: Mapping[str, Any], seed: int, label: str, reward: str) -> None:
        self.name, self.params, self.seed, self.label, self.reward = name, dict(params), seed, label, reward
        self.same = generator_comparison(name)
        gym = _import_gym()
        from reasoning_gym.factory import DATASETS

        if name not in DATASETS:
            near = alike(name, DATASETS, 3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {len(DATASETS)}, such as chain_sum"
            raise ValueError(f"tasks.sources.name: reasoning-gym has no generator {name!r}; {hint}")
        reserved = sorted({"seed", "size"} & params.keys())
        if reserved:
            raise ValueError(f"tasks.sources.params of {label!r}: {reserved[0]} is set by Rollover, remove it")
        self._chunk = lru_cache(maxsize=2)(lambda chunk: self._create(gym, chunk))
        fields = sorted(set(DATASETS[name][1].__dataclass_fields__) - {"seed", "size"})
        its = f" Its parameters are {', '.join(fields)}"
        try:
            self._chunk(0)
        except Exception as error:  # boundary: the generator's own code, as below
            raise ValueError(
                f"tasks.sources.params of {label!r}: the generator {name} refused {self.params}: {error}.{its}"
            ) from error
        failures = list(itertools.takewhile(bool, map(self._failure, range(_FIRST_PROBLEMS))))
        if len(failures) == _FIRST_PROBLEMS:
            raise ValueError(
                f"tasks.sources.params of {label!r}: the generator {name} fails with {self.params} for each of its"
                f" first {_FIRST_PROBLEMS} problems: {failures[-1]}.{its}"
            )

    def problem(self, index: int) -> Task:
        """Return problem number `index` (0, 1, 2, ...) as a plain prompt, without system prompt or instruction.

        FailedProblem, with generator, parameters and error, if the generator raises one.
        """
        chunk, offset = divmod(index, CHUNK_SIZE)
        task_id = f"{self.label}/{self.seed}/{index}"
        try:
            entry = self._chunk(chunk)[offset]
        except Exception as error:
            raise FailedProblem(
                f"task {task_id}: the generator {self.name} with {self.params} raised {type(error).__name__}: {error}"
            ) from error
        columns = {
            "answer": entry["answer"],
            "generator": self.name,
            "params": self.params,
            "seed": chunk_seed(self.seed, chunk),
            "size": CHUNK_SIZE,
            "index": offset,
        }
        return Task(task_id, self.label, self.reward, prompt=entry["question"], columns=columns)

    # Private

    def _failure(self, index: int) -> FailedProblem | None:
        try:
            self.problem(index)
        except FailedProblem as failed:
            return failed
        return None

    def _create(self, gym: Any, chunk: int) -> Any:
        return gym.create_dataset(self.name, seed=chunk_seed(self.seed, chunk), size=CHUNK_SIZE, **self.params)


def chunk_seed(seed: int, chunk: int) -> int:
    """Return 31 bits: entries are seeded with seed + offset, and numpy, which some generators use, takes 32."""
    digest = hashlib.blake2b(f"{seed}/{chunk}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33


def _import_gym() -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ValueError(
            "tasks.sources.kind = 'reasoning_gym' needs the package reasoning-gym: pip install reasoning-gym"
        ) from error
    return reasoning_gym


_DEFAULTS = {
    "chain_sum": {"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 4},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 5},
}


def arithmetic_source(setup: SourceSetup) -> ArithmeticSource:
    """Build the generator `setup.config.name`."""
    check_problem_key(setup.config.problem_key)
    return ArithmeticSource(setup.config.name, setup.config.params, setup.seed, setup.label, setup.reward)


class ArithmeticSource(EndlessSource):
    """Endless sums or products; `problem(i)` depends on (name, params, seed, i) only. ValueError for an invalid name,
    parameter or value."""

    def __init__(self, name: str, params: Mapping[str, Any], seed: int, label: str, reward: str) -> None:
        if name not in _DEFAULTS:
            raise ValueError(
                f"tasks.sources.name = {name!r}: arithmetic has chain_sum and products{did_you_mean(name, _DEFAULTS)}"
            )
        self.name, self.seed, self.label, self.reward = name, seed, label, reward
        self.same = generator_comparison(name)
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
        """Return problem number `index` (0, 1, 2, ...) as a plain prompt, without system prompt or instruction."""
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
