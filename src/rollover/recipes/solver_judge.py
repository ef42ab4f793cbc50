"""Two solvers and a judge, all the same policy: the solvers answer a question, and the judge chooses one answer.

A workflow (workflow.function) with two roles, which are compared and trained separately. `rollover train solver_judge`
runs it; docs/agents.md describes such functions.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from typing import Any

from rollover.tasks.source import SourceSetup
from rollover.types import Task

Message = dict[str, str]
LARGEST = 20  # largest summand


async def solver_judge(task: Task, episode: Any) -> None:
    """Run both solvers at once, then the judge. Reward 1: a right answer, or the choice of a right answer."""
    question, right = str(task.columns["question"]), str(task.columns["answer"])

    async def solve() -> str:
        solver = episode.trajectory("solver")
        reply = await solver.chat([*SOLVED, {"role": "user", "content": question}])
        found = last_number(reply.text)
        solver.reward = float(found == right)
        return found

    answers = await asyncio.gather(solve(), solve())
    judge = episode.trajectory("judge")
    verdict = await judge.chat([*JUDGED, choice(question, answers)], max_tokens=4)
    judge.reward = float(chosen(verdict.text, answers) == right)


def last_number(text: str) -> str:
    """Return the last number of a text, which counts as the answer; "none" without a number."""
    numbers = re.findall(r"-?\d{1,9}", text, re.ASCII)
    return numbers[-1] if numbers else "none"


def choice(question: str, answers: Sequence[str]) -> Message:
    """Return the judge's question."""
    lines = [f"{number}: {answer}" for number, answer in enumerate(answers, start=1)]
    return {"role": "user", "content": "\n".join([question, *lines, "Which is right, 1 or 2?"])}


def chosen(verdict: str, answers: Sequence[str]) -> str:
    """Return the answer that a verdict names, "" if none."""
    number = re.match(r"\W*([12])\b", verdict)
    return answers[int(number[1]) - 1] if number else ""


# Examples before each question: without them a small model writes about numbers but gives no answer.
SOLVED = (
    {"role": "user", "content": "What is 2+3?"},
    {"role": "assistant", "content": "2+3=5"},
)
JUDGED = (
    choice("What is 2+3?", ("5", "6")),
    {"role": "assistant", "content": "1"},
    choice("What is 7+4?", ("10", "11")),
    {"role": "assistant", "content": "2"},
)


class Sums:
    """Endless sums of two numbers. `setup`: see tasks/source.py."""

    def __init__(self, setup: SourceSetup) -> None:
        self.setup = setup

    def problem(self, index: int) -> Task:
        draw = random.Random(f"{self.setup.seed}/{index}")
        one, other = sorted((draw.randint(1, LARGEST), draw.randint(1, LARGEST)))  # 4+3 is the same task as 3+4
        question = f"What is {one}+{other}?"
        label, columns = self.setup.label, {"question": question, "answer": str(one + other)}
        return Task(f"{label}/{self.setup.seed}/{index}", label, self.setup.reward, prompt=question, columns=columns)
