"""The reward `math` against math-verify used directly; and what takes too long is missing, never wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from rollover.config import RewardsConfig
from rollover.rewards.built_in import make_function
from rollover.rewards.pool import RewardPool
from rollover.rewards.protocol import ScoreRequest
from rollover.types import Reward, Task

math_verify = pytest.importorskip("math_verify")
# math-verify alone says False of it, after its limit.
TOO_LONG = "It is $9^{9^{9^{9^{9}}}}$, so \\boxed{9^{9^{9^{9^{9}}}} + 1}"


def expression(draw: random.Random, depth: int = 2) -> str:
    """LaTeX of small numbers, x and y."""
    if not depth or draw.random() < 0.25:
        return draw.choice((str(draw.randint(-12, 12)), "x", "y", f"{draw.randint(1, 99) / 4:g}", "\\pi"))
    a, b = expression(draw, depth - 1), expression(draw, depth - 1)
    return draw.choice(
        (f"{a} + {b}", f"({a}) \\cdot ({b})", f"\\frac{{{a}}}{{{b}}}", f"\\sqrt{{{draw.randint(2, 50)}}}", f"({a})^2",
         f"({a}) - ({b})", f"({a}, {b})", f"\\{{{a}, {b}\\}}", f"x = {a}", f"{draw.randint(1, 99)}\\%",
         f"\\begin{{pmatrix}} {a} & {b} \\\\ 0 & 1 \\end{{pmatrix}}", f"[{a}, {b}]", f"x < {a}")
    )  # fmt: skip


def cases(num: int) -> list[tuple[str, str]]:
    """(completion, reference): the same expression, a rewritten or another one, framed as answers are."""
    draw, out = random.Random(0), []
    frames = ("The answer is ${}$.", "\\boxed{{{}}}", "Hence $\\boxed{{{}}}$.", "{}", "So $1 + 1 = 2$, and \\[{}\\]")
    for _ in range(num):
        reference = expression(draw)
        said = draw.choice((reference, f"{reference} + 0", f"1 \\cdot ({reference})", expression(draw), "no idea"))
        out.append((draw.choice(frames).format(said), reference))
    return out


def directly(completion: str, reference: str) -> float | None:
    """What math-verify says with its own limits; None where they end it."""
    targets = [math_verify.ExprExtractionConfig(), math_verify.LatexExtractionConfig()]
    gold = math_verify.parse(f"\\boxed{{{reference}}}", [math_verify.LatexExtractionConfig()], parsing_timeout=60)
    answer = math_verify.parse(completion, targets, parsing_timeout=60)
    return float(math_verify.verify(gold, answer, timeout_seconds=60)) if gold else None


@pytest.mark.parametrize("num", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_it_agrees_with_math_verify(num: int) -> None:
    score, verdicts = make_function("math", {}, "."), Counter[float]()
    for completion, reference in cases(num):
        expected = directly(completion, reference)
        item = {"completion": completion, "columns": {"answer": reference}}
        if expected is None:
            with pytest.raises(ValueError, match="math-verify cannot read"):
                score(item)
            continue
        assert score(item) == expected, (completion, reference)
        verdicts[expected] += 1
    assert sum(verdicts.values()) > 0.95 * num and min(verdicts.values()) > 0.2 * num, verdicts


def test_what_takes_too_long_is_missing_and_the_others_are_scored() -> None:
    completions = ["\\boxed{4}", TOO_LONG, "\\boxed{5}", "It is 4."]

    async def scored() -> tuple[list[Reward], dict[str, float]]:
        pool = RewardPool(RewardsConfig(num_workers=1, timeout_s=10))
        try:
            task = Task("t", "tasks", "math", prompt="q", columns={"answer": "4"})
            return await pool.score([ScoreRequest(task, text) for text in completions]), pool.stats()
        finally:
            await pool.close()

    rewards, stats = asyncio.run(scored())
    assert [reward.score for reward in rewards] == [1.0, None, 0.0, 1.0]
    assert rewards[1].error == "timeout after 10 s" and stats["rewards/timeouts"] == 1


def test_a_memory_error_is_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """math-verify by itself takes whatever is raised for "not equal"."""

    def raises(error: Exception):
        def verify(*args, **kwargs):
            raise error

        return verify

    item = {"completion": "\\boxed{4}", "columns": {"answer": "4"}}
    monkeypatch.setattr(math_verify, "verify", raises(TypeError("no comparison")))
    assert make_function("math", {}, ".")(item) == 0.0
    monkeypatch.setattr(math_verify, "verify", raises(MemoryError()))
    with pytest.raises(MemoryError):
        make_function("math", {}, ".")(item)
