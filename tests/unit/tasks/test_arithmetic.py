"""The kind arithmetic: the problems of reasoning-gym's generators of those names, without the package."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.config import TaskSourceConfig
from rollover.tasks.source import SourceSetup, TaskSource, build_source

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def source(kind: str, name: str, params: dict[str, Any], seed: int = 7, **more: Any) -> TaskSource:
    config = TaskSourceConfig(kind=kind, name=name, params=params, **more)
    return build_source(SourceSetup(config, name, "exact_match", seed))


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 1])
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("chain_sum", ONE_DIGIT),
        ("products", ONE_DIGIT),
        ("chain_sum", {}),
        ("products", {}),
        ("chain_sum", {"min_terms": 1, "max_terms": 4, "min_digits": 2, "max_digits": 3}),
        ("products", {"max_terms": 3}),
    ],
)
def test_problems_are_those_of_reasoning_gym(name: str, params: dict[str, Any], seed: int) -> None:
    pytest.importorskip("reasoning_gym")
    ours, theirs = (source(kind, name, params, seed) for kind in ("arithmetic", "reasoning_gym"))
    for index in (*range(60), 999, 1000, 123_456):
        mine, other = ours.problem(index), theirs.problem(index)
        assert (mine.prompt, mine.columns["answer"]) == (other.prompt, other.columns["answer"])
        assert mine.task_id == other.task_id and ours.same(mine) == theirs.same(other)


def test_the_package_is_not_imported() -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from rollover.config import TaskSourceConfig\n"
        "from rollover.tasks.source import build_source\n"
        "from rollover.tasks.source import SourceSetup\n"
        "config = TaskSourceConfig(kind='arithmetic', name='products')\n"
        "print(build_source(SourceSetup(config, 'p', 'exact_match', 0)).problem(3).prompt)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Solve the following multiplication: "), done.stderr


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("chain_sums", {}, r"tasks.sources.name = 'chain_sums': arithmetic has chain_sum and products. Did you mean"),
        ("products", {"digits": 3}, "params.digits of 'products': products has no such parameter, its parameters are"),
        ("products", {"min_terms": 3}, "min_terms = 3 and max_terms = 2: give whole numbers"),
        ("products", {"max_digits": 0.5}, "min_digits = 1 and max_digits = 0.5: give whole numbers"),
        ("products", {"min_digits": 0}, "min_digits = 0 and max_digits = 5: give whole numbers"),
        ("products", {"max_terms": True}, "max_terms = True: give whole numbers"),
    ],
)
def test_what_it_has_not_is_refused(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source("arithmetic", name, params)


def test_a_column_tells_no_generated_problems_apart() -> None:
    with pytest.raises(ValueError, match="a generator has no columns"):
        source("arithmetic", "products", {}, problem_key="answer")
