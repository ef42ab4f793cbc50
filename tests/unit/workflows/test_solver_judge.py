"""The recipe `solver_judge`: who is asked what, what each role is worth, and which problems there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollover.config import Config
from rollover.config.load import load_config
from rollover.config.recipes import recipe
from rollover.recipes.solver_judge import LARGEST, choice, chosen, last_number, solver_judge
from rollover.tasks.source import SourceSetup, build_source
from unit.workflows.scripted_host import ScriptedHost

CONFIG: Config = load_config([recipe("solver_judge")]).config
WRONG_THEN_RIGHT = ["12+7=18", "12+7 is 19"]


def scores(answers: list[str], verdict: str) -> dict[str, list[float | None]]:
    """By role, of an episode in which the solvers and the judge say so."""
    left = list(answers)

    def says(before: str) -> str:
        return verdict if "Which is right" in before else left.pop(0)

    host = ScriptedHost(solver_judge, says, max_turns=CONFIG.workflow.max_turns)
    host.task = replace(host.task, columns={"question": "What is 12+7?", "answer": "19"})
    found: dict[str, list[float | None]] = {"solver": [], "judge": []}
    for rollout_id, reward in host.run().items():
        found[host.rollouts[rollout_id].role].append(reward.score)
    judge = next(r for r in host.rollouts.values() if r.role == "judge")
    numbers = [last_number(answer) for answer in answers]
    shown = host.tokenizer.decode(judge.prompt.ids)
    assert any(choice("What is 12+7?", order)["content"] in shown for order in (numbers, numbers[::-1]))
    return {role: sorted(of, key=str) for role, of in found.items()}


@pytest.mark.parametrize(
    ("answers", "verdict", "of_solvers", "of_judge"),
    [
        (["19", "12+7=19"], "2", [1.0, 1.0], 1.0),
        (["I cannot", "18"], "1", [0.0, 0.0], 0.0),
        (WRONG_THEN_RIGHT, "both", [0.0, 1.0], 0.0),
    ],
)
def test_each_role_is_scored_by_what_it_said(
    answers: list[str], verdict: str, of_solvers: list[float], of_judge: float
) -> None:
    assert scores(answers, verdict) == {"solver": of_solvers, "judge": [of_judge]}


def test_one_verdict_of_two_is_right_where_one_solver_is() -> None:
    worth = [scores(WRONG_THEN_RIGHT, verdict)["judge"][0] for verdict in ("1", "2")]
    assert sorted(worth, key=str) == [0.0, 1.0]


def test_what_counts_as_an_answer_and_as_a_verdict() -> None:
    assert [last_number(text) for text in ("2+3=5", "-4", "it is five", "7.")] == ["5", "-4", "none", "7"]
    answers = ("18", "19")
    assert [chosen(text, answers) for text in ("1", " 2: 19", "12", "19", "", "(1)")] == ["18", "19", "", "", "", "18"]


def test_the_problems_are_sums_that_are_the_same_each_time() -> None:
    source = build_source(SourceSetup(CONFIG.tasks.sources[0], "sums", "", CONFIG.run.seed))
    for index in range(50):
        task = source.problem(index)
        numbers = [int(part) for part in str(task.columns["question"])[len("What is ") : -1].split("+")]
        assert task.columns["answer"] == str(sum(numbers)) and 1 <= min(numbers) <= max(numbers) <= LARGEST
        assert task == source.problem(index) and task.prompt == task.columns["question"]
