"""An evaluation asks the engine as a driver does: a failure is tried again, and given up in the end, by name."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

import virtual_time
from fake_engine import FakeEngine, RecordingEngine
from heard import hear
from rollover.config import Config
from rollover.engine.protocol import ExtendRequest
from rollover.envs.build import SingleTurn
from rollover.envs.protocol import RunEnvironment, StateLost, written
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.scorer import make_scorer
from rollover.run.evaluate import EvalAnswers, EvalTasks, answer_tasks, summarize
from rollover.track.answers import Answer
from rollover.types import Prompt, Reward, Rollout, Segment, Task

CONFIG = Config.model_validate(
    {"eval": {"num_tasks": 3, "samples_per_task": 2}, "watchdog": {"max_failures": 3, "retry_s": 1}}
)
TASKS = EvalTasks([Task(f"t{i}", "s", "r", prompt="x") for i in range(3)], [Prompt((1, 2))] * 3)


class Failing(FakeEngine):
    """Fails `times` times at the rollout eval-1-0."""

    def __init__(self, times: int) -> None:
        super().__init__(lambda seed: 5 + seed % 20)
        self.left = times

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        if request.rollout_id == "eval-1-0" and self.left:
            self.left -= 1
            raise ConnectionError("connection refused")
        return await super().extend(request)


class Rewarder:
    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        return [Reward(1.0) for _ in requests]

    async def close(self) -> None: ...


TOKENIZER = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
SINGLE_TURN = SingleTurn(make_scorer(Rewarder(), TOKENIZER, Config()))


def answers(
    engine: FakeEngine, said: list[str], environment: RunEnvironment = SINGLE_TURN, config: Config = CONFIG
) -> list[Answer]:
    hear(said)

    async def go() -> list[Answer]:
        try:
            found = await answer_tasks(TASKS, engine, environment, TOKENIZER, config, frozenset())
            return found.answers
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(asyncio.all_tasks()) == 1, "rollouts were left running"

    return virtual_time.run(go())


def test_a_failure_is_tried_again() -> None:
    said: list[str] = []
    assert answers(Failing(2), said) == answers(Failing(0), [])
    assert 1 <= len(said) <= 2 and "the engine failed at rollout eval-1-0 (ConnectionError: connection" in said[0]


def test_repeated_engine_failure_ends_evaluation_cleanly() -> None:
    with pytest.raises(ValueError, match="failed 3 times in a row at rollout eval-1-0 .*connection refused"):
        answers(Failing(99), [])


class HangingBeside(Failing):
    """Another rollout hangs, whatever interrupts it."""

    def __init__(self) -> None:
        super().__init__(99)
        self.asked: set[str] = set()
        self.released: set[str] = set()

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        self.asked.add(request.rollout_id)
        if request.rollout_id == "eval-2-0":
            await asyncio.get_running_loop().create_future()
        return await super().extend(request)

    def release(self, rollout_ids: Iterable[str]) -> None:
        self.released |= set(rollout_ids := list(rollout_ids))
        super().release(rollout_ids)


def test_failed_evaluation_releases_rollouts_at_once() -> None:
    off = CONFIG.watchdog.model_copy(update={"rollout_timeout_s": 0, "reward_timeout_s": 0})
    engine = HangingBeside()
    with pytest.raises(ValueError, match="failed 3 times in a row at rollout eval-1-0"):
        answers(engine, [], config=CONFIG.model_copy(update={"watchdog": off}))
    assert len(engine.asked) == 6 and engine.released == engine.asked


class Twice(RunEnvironment):
    """Tells the policy a token after each of its first two turns; a rollout is worth what it was told, in tokens."""

    async def next(self, rollout: Rollout) -> Segment | None:
        told = sum(not segment.trainable for segment in rollout.segments)
        return written(rollout, [7]) if told < 2 else None

    async def score(self, rollouts: list[Rollout], /) -> list[Reward]:
        return [Reward(float(r.num_tokens - r.num_sampled_tokens)) for r in rollouts]

    def scores_singly(self, task: Task, /) -> bool:
        return False


class Interrupted(Twice):
    """At the second turn of the rollout eval-1-1 it raises an error (None: hangs), the first `times` times."""

    def __init__(self, error: Exception | None, times: int = 100) -> None:
        self.error, self.left = error, times

    async def next(self, rollout: Rollout) -> Segment | None:
        if (rollout.task.task_id, rollout.sibling) == ("t1", 1) and len(rollout.segments) > 1 and self.left:
            self.left -= 1
            if self.error is not None:
                raise self.error
            await asyncio.get_running_loop().create_future()
        return await super().next(rollout)


class SlowScore(Twice):
    async def score(self, rollouts: list[Rollout], /) -> list[Reward]:
        if rollouts[0].task.task_id == "t1":
            await asyncio.get_running_loop().create_future()
        return await super().score(rollouts)


def test_first_stall_ends_the_evaluation() -> None:
    patient = CONFIG.watchdog.model_copy(update={"rollout_timeout_s": 5, "max_failures": 1000})
    with pytest.raises(ValueError, match="watchdog: .*rollout eval-2-0 .*: the evaluation is given up"):
        answers(HangingBeside(), [], config=CONFIG.model_copy(update={"watchdog": patient}))
    with pytest.raises(ValueError, match="watchdog: the rewards of group eval-1 .*: the evaluation is given up"):
        answers(FakeEngine(lambda seed: 5), [], SlowScore())


def test_answers_are_played_with_the_environment_and_scored_by_it() -> None:
    engine = RecordingEngine(lambda seed: 5)
    found = answers(engine, [], Twice())
    assert [a.score for a in found] == [2.0] * 6
    assert len(engine.requests) == 3 * 6, "a turn, and one after each thing that it was told"
    for answer, i in zip(found, [(task, sibling) for task in range(3) for sibling in range(2)], strict=True):
        turns = [r for r in engine.requests if r.rollout_id == "eval-{}-{}".format(*i)]
        assert [r.text_start for r in turns] == [0, len(turns[1].generated_ids), len(turns[2].generated_ids)]
        assert turns[1].generated_ids[-1] == turns[2].generated_ids[-1] == 7
        assert answer.num_tokens == len(answer.answer.split()) - 2, "sampled tokens"


def test_where_the_environment_fails_an_answer_has_no_score() -> None:
    found = answers(FakeEngine(lambda seed: 5), [], Interrupted(KeyError("no such page")))
    assert [a.score for a in found] == [2.0, 2.0, 2.0, None, 2.0, 2.0]
    assert str(found[3].error).startswith("the environment failed at rollout eval-1-1 (KeyError: 'no such page' (")


def test_lost_environment_is_restarted_up_to_its_limit() -> None:
    said: list[str] = []
    expected = answers(FakeEngine(lambda seed: 5), [], Twice())
    found = answers(FakeEngine(lambda seed: 5), said, Interrupted(StateLost("the page is gone"), times=1))
    assert [(a.score, a.answer) for a in found] == [(a.score, a.answer) for a in expected]
    assert any("the page is gone" in line and "it restarts" in line for line in said)
    given_up = answers(FakeEngine(lambda seed: 5), [], Interrupted(StateLost("the page is gone")))
    assert [a.score for a in given_up] == [2.0, 2.0, 2.0, None, 2.0, 2.0]
    assert "the page is gone" in str(given_up[3].error)


def test_environment_timeout_leaves_answer_without_score() -> None:
    said: list[str] = []
    found = answers(FakeEngine(lambda seed: 5), said, Interrupted(None))
    assert [a.score for a in found] == [2.0, 2.0, 2.0, None, 2.0, 2.0]
    assert found[3].error == "the environment exceeded workflow.timeout_s = 300"
    assert found[3].stop_reason == "timeout" and len(said) == 1
    assert "rollout eval-1-1 exceeded workflow.timeout_s" in said[0]


def test_settings_differ_in_sampling_over_the_same_tasks() -> None:
    engine = RecordingEngine(lambda seed: 30)
    settings = [
        {"name": "greedy", "temperature": 0.0},
        {"name": "long", "samples_per_task": 3, "temperature": 0.5, "top_p": 0.9, "max_new_tokens": 40},
    ]
    config = Config.model_validate(
        {"eval": {"num_tasks": 3, "samples_per_task": 2, "max_new_tokens": 9, "majority": True, "settings": settings}}
    )

    async def go() -> EvalAnswers:
        return await answer_tasks(TASKS, engine, SINGLE_TURN, TOKENIZER, config, frozenset())

    found = virtual_time.run(go())
    kinds = Counter((r.sampling.temperature, r.sampling.top_p, r.max_new_tokens) for r in engine.requests)
    assert kinds == {(1.0, 1.0, 9): 6, (0.0, 1.0, 9): 3, (0.5, 0.9, 40): 9}
    assert [a.setting for a in found.answers] == [""] * 6 + ["greedy"] * 3 + ["long"] * 9
    row = summarize(found, config)
    assert (row["samples"], row["settings"]["long"]["tasks"], row["settings"]["long"]["samples"]) == (
        [{"prompt": "x", "completion": a.answer, "score": 1.0} for a in found.answers[:6:2]], 3, 9
    )  # fmt: skip
    assert row["truncated"] == 1 and row["tokens"] == 9 and row["settings"]["long"]["tokens"] == 30
    assert row["settings"]["long"]["maj@3"] == 1 and "pass@4" not in row["settings"]["long"]
    assert all(a.vote is None for a in answers(FakeEngine(lambda seed: 5), [])), "nobody asks"
