"""Held-out tasks of a workflow: played by its agents, scored by role, counted apart from training, ended in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import virtual_time
from fake_engine import FakeEngine, RecordingEngine
from heard import hear
from rollover.config import Config
from rollover.engine.protocol import ExtendRequest
from rollover.run.evaluate import EvalAnswers, EvalTasks, answer_tasks, check_roles, summarize
from rollover.types import Segment, Task
from rollover.workflows.conversations import BudgetUsedUp, Chats
from rollover.workflows.episodes import Episodes
from rollover.workflows.protocol import WorkflowFunction
from rollover.workflows.turns import EpisodeLimits
from unit.envs import templates

TOKENIZER = templates.tokenizer(templates.CHATML)
CHATS = Chats(TOKENIZER)
PROMPT = CHATS.for_tools(()).prompt([{"role": "user", "content": "Begin"}])
TASKS = EvalTasks([Task(f"t{i}", "s", "r", prompt="Begin", columns={"i": i}) for i in range(3)], [PROMPT] * 3)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Evaluation:
    """Of `agent`, on the fake engine. `said`: the lines; `training`: the episodes that a run has beside it."""

    def __init__(self, agent: Callable[..., Any], engine: FakeEngine | None = None, **limits: Any) -> None:
        self.config = Config.model_validate(
            {
                "eval": {"num_tasks": 3, "samples_per_task": 2, "temperature": 0.5},
                "rollout": {"max_new_tokens": 60},
                "workflow": {"function": "a.py:b"},
            }
        )
        self.engine = engine or FakeEngine(lambda seed: 5 + seed % 20, vocab_size=len(TOKENIZER))
        settings = EpisodeLimits(**{"max_new_tokens": 60, "max_prompt_tokens": 2000, "retries": 1, **limits})
        function = WorkflowFunction(agent, "mine")
        self.training = Episodes(function, CHATS, settings)
        self.said: list[str] = hear([])

    async def found(self) -> EvalAnswers:
        end = frozenset([CHATS.for_tools(()).end_of_turn])
        try:
            return await answer_tasks(TASKS, self.engine, self.training, TOKENIZER, self.config, end)
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(asyncio.all_tasks()) == 1, "agents were left at work"

    def run(self) -> EvalAnswers:
        found = virtual_time.run(self.found())
        assert not self.training.counts and not self.training.pending
        return found


async def talk(task: Any, episode: Any) -> None:
    """Two solvers, one with a turn more, and a judge. What each is worth depends on the task."""

    async def solve(turns: int) -> str:
        solver, messages = episode.trajectory("solver"), [user("Begin")]
        for _ in range(turns):
            reply = await solver.chat(messages, max_tokens=20)
            messages += [reply.message, user("more")]
        solver.reward = turns / 2
        return reply.text

    texts = await asyncio.gather(solve(1), solve(2))
    judge = episode.trajectory("judge")
    await judge.chat([user("".join(texts)[:10])])
    judge.reward = float(task.columns["i"] == 1)


def test_episodes_are_scored_as_a_whole_and_by_role() -> None:
    engine = RecordingEngine(lambda seed: 5 + seed % 10, vocab_size=len(TOKENIZER))
    evaluation = Evaluation(talk, engine)
    found = evaluation.run()
    assert [(a.task_id, a.sibling) for a in found.answers] == [(f"t{i}", s) for i in range(3) for s in range(2)]
    assert [a.score for a in found.answers] == pytest.approx([0.5, 0.5, 2.5 / 3, 2.5 / 3, 0.5, 0.5])
    assert [(of.role, of.score) for of in found.answers[2].roles] == [("solver", 0.5), ("solver", 1.0), ("judge", 1.0)]
    assert found.answers[0].answer.count("[solver]") == 2 and "[judge]" in found.answers[0].answer
    assert found.ends == {"done": 6, "length": 0, "timeout": 0, "error": 0, "restarted": 0} and not evaluation.said
    row = summarize(found, evaluation.config)
    assert row["roles"]["solver"]["mean"] == 0.75 and row["roles"]["solver"]["samples"] == 12
    assert row["roles"]["judge"]["mean"] == pytest.approx(1 / 3) and row["episodes"] == found.ends
    assert row["mean"] == pytest.approx((0.5 + 0.5 + 2.5 / 3) / 3)
    assert {r.sampling.temperature for r in engine.requests} == {0.5}
    assert all(r.rollout_id.startswith("eval-") for r in engine.requests)
    assert Evaluation(talk).run() == Evaluation(talk).run(), "another evaluation of the same weights says the same"


def test_a_role_that_is_not_trained_is_no_part_of_the_whole() -> None:
    evaluation = Evaluation(talk)
    workflow = {"function": "a.py:b", "roles": {"solver": {}, "judge": {"trained": False}}}
    evaluation.config = Config.model_validate(evaluation.config.model_dump() | {"workflow": workflow})
    found = evaluation.run()
    assert [a.score for a in found.answers] == [0.75] * 6
    assert summarize(found, evaluation.config)["roles"]["judge"]["mean"] == pytest.approx(1 / 3)


def test_a_role_that_some_episodes_lack_is_one_of_all_others() -> None:
    """An agent that asks a judge of some answers: its own scores are those of all episodes, and not of those alone."""

    async def judged_at_times(task: Any, episode: Any) -> None:
        own = episode.trajectory()
        await own.chat([user("Begin")])
        own.reward = float(task.columns["i"])
        if task.columns["i"] == 2:
            judge = episode.trajectory("judge")
            await judge.chat([user("right?")])
            judge.reward = 0.5

    evaluation = Evaluation(judged_at_times)
    found = evaluation.run()
    row = summarize(found, evaluation.config)
    assert row["roles"]["policy"]["mean"] == 1.0 and row["roles"]["policy"]["samples"] == 6
    assert row["roles"]["judge"]["mean"] == 0.5 and row["roles"]["judge"]["samples"] == 2
    assert [[of.role for of in a.roles] for a in found.answers[::2]] == [["policy"], ["policy"], ["policy", "judge"]]
    with pytest.raises(ValueError, match=r"workflow.roles has no 'policy'"):
        check_roles(found, ["judge"])


def test_what_fails_is_run_again_and_then_has_no_score() -> None:
    tries: list[str] = []

    async def failing(task: Any, episode: Any) -> float:
        tries.append(episode.episode_id)
        await episode.trajectory().chat([user("Begin")])
        if task.columns["i"] == 1 and (episode.episode_id.endswith("-1") or tries.count(episode.episode_id) == 1):
            raise KeyError("planned")
        return 1.0

    evaluation = Evaluation(failing)
    found = evaluation.run()
    assert [a.score for a in found.answers] == [1.0, 1.0, 1.0, None, 1.0, 1.0]
    assert "planned" in (found.answers[3].error or "") and found.ends["error"] == 1 and found.ends["restarted"] == 2
    assert "episode eval-1-" in evaluation.said[0] and "1 ended with error" in evaluation.said[-1]
    assert sorted(tries) == sorted([f"eval-{i}-{s}" for i in range(3) for s in range(2)] + ["eval-1-0", "eval-1-1"])


def test_what_takes_too_long_is_ended_and_counted() -> None:
    async def slow(task: Any, episode: Any) -> float:
        reply = await episode.trajectory().chat([user("Begin")])
        if task.columns["i"] == 2:
            await asyncio.get_running_loop().create_future()
        return float(len(reply.token_ids) > 0)

    evaluation = Evaluation(slow, timeout_s=5.0)
    found = evaluation.run()
    assert [a.score for a in found.answers] == [1.0] * 4 + [None] * 2 and found.ends["timeout"] == 2
    assert "timed out" in (found.answers[5].error or "") and "2 ended with timeout" in evaluation.said[-1]
    assert Evaluation(slow, timeout_s=5.0, on_timeout="score", timeout_score=-1.0).run().answers[5].score == -1.0


def test_an_agent_that_makes_no_call_or_has_no_budget_is_named() -> None:
    async def idle(task: Any, episode: Any) -> float:
        if task.columns["i"] == 0:
            return 1.0
        trajectory, messages = episode.trajectory(), [user("Begin")]
        for _ in range(2):
            reply = await trajectory.chat(messages)
            messages += [reply.message, user("more")]
        return 1.0

    found = Evaluation(idle, max_turns=1).run()
    assert [a.score for a in found.answers] == [None, None, 0.0, 0.0, 0.0, 0.0]
    assert "made no model call" in (found.answers[0].error or "") and found.ends["length"] == 4
    assert found.answers[0].num_tokens == 0


def test_one_that_asked_for_nothing_has_the_cause_of_its_end() -> None:
    async def silent(task: Any) -> float:
        if task.columns["i"] == 0:
            raise KeyError("planned")
        if task.columns["i"] == 1:
            await asyncio.get_running_loop().create_future()
        return 1.0

    errors = [a.error or "" for a in Evaluation(silent, timeout_s=5.0).run().answers]
    assert all("planned" in error for error in errors[:2]) and all("timed out" in error for error in errors[2:4])
    assert errors[4:] == ["the workflow made no model call"] * 2


def test_cancelled_call_has_no_reward() -> None:
    async def hasty(task: Any, episode: Any) -> float:
        lost = asyncio.ensure_future(episode.trajectory("lost").chat([user("Begin")]))
        await asyncio.sleep(0)
        await episode.trajectory("kept").chat([user("Begin")])
        lost.cancel()
        return 1.0

    engine = FakeEngine(lambda seed: 5 + seed % 50, vocab_size=len(TOKENIZER))
    found = Evaluation(hasty, engine).run()
    assert all(a.score == 1.0 for a in found.answers)
    assert {of.score for a in found.answers for of in a.roles if of.role == "lost"} <= {None, 1.0}
    assert None in {of.score for a in found.answers for of in a.roles if of.role == "lost"}


def test_an_engine_that_fails_ends_the_evaluation_and_its_agents() -> None:
    class Failing(FakeEngine):
        async def extend(self, request: ExtendRequest) -> list[Segment]:
            if request.rollout_id == "eval-1-0":
                raise ConnectionError("refused")
            return await super().extend(request)

    async def asking(task: Any, episode: Any) -> float:
        try:
            await episode.trajectory().chat([user("Begin")])
        except BudgetUsedUp:
            return 0.0
        return 1.0

    with pytest.raises(ValueError, match="failed 8 times in a row at rollout eval-1-0 .*refused"):
        Evaluation(asking, Failing(lambda seed: 5, vocab_size=len(TOKENIZER))).run()


def test_a_stop_in_the_middle_ends_every_agent() -> None:
    ended: list[str] = []

    async def hanging(task: Any, episode: Any) -> float:
        await episode.trajectory().chat([user("Begin")])
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(episode.episode_id)
        return 0.0

    async def stopped() -> None:
        evaluating = asyncio.ensure_future(Evaluation(hanging).found())
        for _ in range(300):
            await asyncio.sleep(0)
        evaluating.cancel()
        await asyncio.gather(evaluating, return_exceptions=True)

    virtual_time.run(stopped())
    assert len(ended) == 6


@pytest.mark.parametrize(
    ("named", "why"),
    [
        (["solver", "judges"], "workflow.roles has no 'judge', .* it has solver, judges. Did you mean"),
        (["solver", "judge", "critic"], "workflow.roles.critic: no trajectory of the held-out episodes has this role"),
    ],
)
def test_roles_that_nobody_has_are_refused(named: list[str], why: str) -> None:
    found = Evaluation(talk).run()
    check_roles(found, [])
    check_roles(found, ["judge", "solver"])
    with pytest.raises(ValueError, match=why):
        check_roles(found, named)
