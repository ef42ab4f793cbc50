"""Two solvers and a judge, all three the one policy: the solvers answer a question, each for itself, and the judge
chooses among their answers. A workflow (workflow.function) with two roles, which are compared and trained apart.

`rollover train solver_judge` runs it; docs/agents.md says what such a function may do.
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
LARGEST = 20  # of the numbers to be added


async def solver_judge(task: Task, episode: Any) -> None:
    """Both solvers are asked at once. A solver is worth 1 if its answer is right, the judge if the one it chose is."""
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
    """What counts as the answer in what a solver says; "none" where there is no number."""
    numbers = re.findall(r"-?\d{1,9}", text, re.ASCII)
    return numbers[-1] if numbers else "none"


def choice(question: str, answers: Sequence[str]) -> Message:
    """What the judge is asked."""
    lines = [f"{number}: {answer}" for number, answer in enumerate(answers, start=1)]
    return {"role": "user", "content": "\n".join([question, *lines, "Which is right, 1 or 2?"])}


def chosen(verdict: str, answers: Sequence[str]) -> str:
    """The answer that a verdict names; "" where it names none."""
    number = re.match(r"\W*([12])\b", verdict)
    return answers[int(number[1]) - 1] if number else ""


# Worked examples before what each is asked: without them a small model talks about numbers, and names none.
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
    """Sums of two numbers, without an end. `setup`: see tasks/source.py."""

    def __init__(self, setup: SourceSetup) -> None:
        self.setup = setup

    def problem(self, index: int) -> Task:
        draw = random.Random(f"{self.setup.seed}/{index}")
        one, other = sorted((draw.randint(1, LARGEST), draw.randint(1, LARGEST)))  # 4+3 is no other problem than 3+4
        question = f"What is {one}+{other}?"
        label, columns = self.setup.label, {"question": question, "answer": str(one + other)}
        return Task(f"{label}/{self.setup.seed}/{index}", label, self.setup.reward, prompt=question, columns=columns)
