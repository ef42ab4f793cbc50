"""Rollouts of several turns through driver, lifecycle, cache, ledger and batch: interrupted, resumed, and restarted."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

import virtual_time
from local_trainer import build_batch
from rollover.config import Config
from rollover.config.algorithm import AlgorithmConfig
from rollover.config.workflow import WorkflowConfig
from rollover.engine.protocol import ExtendRequest
from rollover.envs.build import CustomEnvironment, build_environment
from rollover.envs.protocol import EnvironmentSetup, RunEnvironment, written
from rollover.types import DropReason, Reward, Rollout, RolloutState, Segment, StopReason
from unit.rollout.dialogue import SAID, Dialogue, TurnEngine, said
from unit.rollout.hanging import steps
from unit.rollout.run import EOS, PARTIAL, Run
from virtual_time import VirtualLoop

ROOMY = {"max_new_tokens": 100}
MODES = {
    "sync": {},
    "partial": PARTIAL,
    "few slots": {**PARTIAL, "max_running": 3},
    "drop": {**PARTIAL, "max_staleness": 1, "on_stale": "drop"},
    "mask": {**PARTIAL, "max_staleness": 1, "on_stale": "mask"},
    "budget": {**PARTIAL, "interrupt": "token_budget", "token_budget": 4},
    "continued": {**PARTIAL, "max_continuations": 1},
}


def dialogue(environment: RunEnvironment | None = None, **config: object) -> Run:
    return Run(engine=TurnEngine(), environment=environment or Dialogue(), **{**ROOMY, **config})  # type: ignore[arg-type]


def tokens_of(groups) -> dict[int, list[list[int]]]:
    return {g.group_id: [r.token_ids() for r in g.rollouts] for g in groups}


def straight(num_groups: int) -> dict[int, list[list[int]]]:
    """By group id: the tokens of a run in which nothing is ever interrupted."""
    return tokens_of(g for batch in dialogue().steps((num_groups + 1) // 2) for g in batch)


def turn_lengths(rollout: Rollout) -> list[int]:
    """Sampled tokens of each turn."""
    lengths = [0]
    for segment in rollout.segments:
        if segment.trainable:
            lengths[-1] += len(segment)
        else:
            lengths.append(0)
    return lengths


@pytest.mark.parametrize("pause", [0, 3])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_the_policy_goes_on_after_the_environment(mode: dict, pause: int) -> None:
    environment = Dialogue(pause=pause)
    run = dialogue(environment, **mode)
    groups = [g for batch in run.steps(6) for g in batch]
    assert tokens_of(groups).items() <= straight(1 + max(g.group_id for g in groups)).items()
    for rollout in (r for g in groups for r in g.rollouts):
        assert said(rollout) == [[SAID + 1] * 3, [SAID + 2] * 3]
        assert rollout.stop_reason is StopReason.EOS and rollout.token_ids()[-1] == EOS
        assert rollout.num_sampled_tokens == rollout.num_tokens - 6
        assert all(3 <= num <= 9 for num in turn_lengths(rollout)), "stop strings and ends count within a turn"
    asked = Counter(rollout_id for rollout_id, _ in set(environment.asked))
    assert max(asked.values()) == 3, "after every turn, and at no other time"


def test_environment_tokens_are_never_trained_nor_generated() -> None:
    run = dialogue()
    (groups,) = run.steps(1)
    for sample in build_batch(groups, AlgorithmConfig()).samples:
        written_by_env = np.isin(sample.token_ids, [SAID + 1, SAID + 2])
        assert written_by_env.sum() == 6 and (sample.mask == ~written_by_env).all()
        assert (sample.behavior_logprobs[written_by_env] == 0).all()
        assert (sample.behavior_logprobs[sample.mask] < 0).all()
    sampled = sum(r.num_sampled_tokens for g in groups for r in g.rollouts)
    assert run.ledger.generated_tokens == run.ledger.trained.tokens == sampled


def test_a_killed_run_goes_on_in_the_middle_of_a_dialogue() -> None:
    """Rollouts parked behind the environment's tokens are saved and go on as if nothing had been."""
    run = dialogue(**{**PARTIAL, "max_running": 3})
    for _ in range(20):
        run.steps(1)
        parked = [r for g in run.cache.groups.values() for r in g.rollouts if r.state is RolloutState.PARKED]
        if any(not r.segments[-1].trainable for r in parked) and any(len(said(r)) == 2 for r in parked):
            break
    else:
        raise AssertionError("no rollout was parked right after its environment's turn")
    again = dialogue(**{**PARTIAL, "max_running": 3})
    again.load(run.save())
    again.check()
    groups = [g for batch in again.steps(4) for g in batch]
    assert tokens_of(groups).items() <= straight(1 + max(g.group_id for g in groups)).items()
    assert any(r.rollout_id in {p.rollout_id for p in parked} for g in groups for r in g.rollouts)


def test_the_environment_may_end_a_rollout() -> None:
    run = dialogue(Dialogue(turns=2, ends_itself=True))
    (groups,) = run.steps(1)
    assert {r.stop_reason for g in groups for r in g.rollouts} == {StopReason.ENV_DONE}


def test_answer_without_remaining_budget_ends_with_length() -> None:
    """A turn has 9 tokens at most and an answer 3, so the second turn of some ends with 14 of 15 or fewer."""
    run = dialogue(Dialogue(turns=9), max_new_tokens=15)
    rollouts = [r for batch in run.steps(6) for g in batch for r in g.rollouts]
    assert {r.stop_reason for r in rollouts if r.num_tokens < 15} == {StopReason.LENGTH}
    assert all(r.num_tokens <= 15 and r.segments[-1].trainable for r in rollouts)
    assert any(r.token_ids()[-1] == EOS for r in rollouts), "none stopped by itself"


def test_turns_are_no_continuations() -> None:
    """max_continuations counts interruptions: with 1, what ended two turns and was never interrupted may be yet."""
    run = dialogue(**{**PARTIAL, "max_continuations": 1, "max_running": 2})
    later_turns = 0
    for rollout in (r for batch in run.steps(12) for g in batch for r in g.rollouts):
        interrupted = [i for i, s in enumerate(rollout.segments) if s.trainable and s.stop_reason is StopReason.PAUSED]
        assert len(interrupted) <= 1
        later_turns += any(not s.trainable for i in interrupted for s in rollout.segments[:i])
    assert later_turns


class Broken(Dialogue):
    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer

    async def next(self, rollout: Rollout) -> Segment | None:
        return self.answer(rollout)


def test_failing_environment_is_retried_and_fails_one_reward() -> None:
    asked: Counter[str] = Counter()

    def fail(rollout: Rollout) -> Segment | None:
        asked[rollout.rollout_id] += 1
        if rollout.rollout_id == "0-1" or (rollout.rollout_id == "1-1" and asked["1-1"] == 1):
            raise OSError("no such tool")
        return None

    run = dialogue(Broken(fail), workflow=WorkflowConfig(retries=2), group_size=3)
    (groups,) = run.steps(1)
    assert asked["0-1"] == 3 and asked["1-1"] == 2 and [g.group_id for g in groups] == [0, 1]
    rollouts = {r.rollout_id: r for g in groups for r in g.rollouts}
    failed = rollouts.pop("0-1")
    assert failed.reward is not None and failed.reward.missing and failed.stop_reason is StopReason.ERROR
    assert str(failed.reward.error).startswith("the environment failed at rollout 0-1 (OSError: no such tool (")
    assert all(r.reward == Reward(float(sum(r.token_ids()))) for r in rollouts.values())
    stats = run.driver.player.env_tasks.stats()
    assert stats["episodes/failed"] == 1 and stats["episodes/retried"] == 3
    again, missing = run.said
    assert "): retry; later ones are counted" in again and "): its reward is missing; later" in missing


def test_an_environment_that_always_fails_ends_the_run() -> None:
    def fail(rollout: Rollout) -> Segment:
        raise OSError("no such tool")

    run = dialogue(Broken(fail))
    with pytest.raises(
        ValueError, match="none of the first 2 groups .* 4 are missing: the environment failed .* such tool"
    ):
        run.steps(1)
    run.check()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda rollout: "hello", "it is a str, and no Segment"),
        (lambda rollout: rollout.segments[-1], "its tokens are marked as sampled by the policy"),
        (lambda rollout: written(rollout, []), "it has no token, and is not the end"),
        (lambda rollout: written(rollout, [7, 1000]), "its token 1 has the id 1000, and those of the model"),
        (lambda rollout: written(rollout, [-1]), "its token 0 has the id -1, and those of the model are 0 to 999"),
    ],
)
def test_a_wrong_answer_is_refused(answer, why: str) -> None:
    run = dialogue(CustomEnvironment(Broken(answer), 1000))
    with pytest.raises(ValueError, match=f"rollout.environment gave a wrong answer at rollout .-.: {why}"):
        run.steps(1)
    run.check()


class Hangs(Dialogue):
    """In its second turn at the first rollout: for ever, or until `free` is set."""

    free = False

    async def next(self, rollout: Rollout) -> Segment | None:
        if rollout.rollout_id == "0-0" and any(not s.trainable for s in rollout.segments):
            while not self.free:
                await asyncio.sleep(0.01)
        return await super().next(rollout)


@pytest.mark.parametrize("on_timeout", ["missing", "score"])
def test_an_environment_that_works_for_too_long_is_given_up(on_timeout: str) -> None:
    workflow = WorkflowConfig.model_validate(
        {"timeout_s": 3.0, "on_timeout": on_timeout} | ({"timeout_score": -7.0} if on_timeout == "score" else {})
    )
    run = dialogue(Hangs(), workflow=workflow, num_tasks=8)
    batches = steps(run, 2)
    (line,) = run.said
    assert line.startswith("the environment of rollout 0-0 exceeded workflow.timeout_s = 3 s: the rollout ends")
    assert run.driver.player.env_tasks.num_timed_out == 1
    groups = [g for batch in batches for g in batch]
    if on_timeout == "missing":
        assert [g.group_id for g in groups] == [1, 2, 3, 4]
        assert run.ledger.dropped[DropReason.TOO_FEW_REWARDS].rollouts == 2
        return
    assert [g.group_id for g in groups] == [0, 1, 2, 3]
    late, sibling = groups[0].rollouts
    assert late.reward == Reward(-7.0) and late.stop_reason is StopReason.TIMEOUT and len(said(late)) == 1
    assert sibling.reward == Reward(float(sum(sibling.token_ids())))


def test_time_in_which_nobody_could_look_is_not_the_environments() -> None:
    """Nor that of waiting for the model: three of four seconds in two turns."""

    class Slow(Dialogue):
        async def next(self, rollout: Rollout) -> Segment | None:
            await asyncio.sleep(1.5)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.let_pass(100.0)  # a trainer trains in the loop's thread
            return await super().next(rollout)

    class SlowEngine(TurnEngine):
        async def extend(self, request: ExtendRequest) -> list[Segment]:
            await asyncio.sleep(50)
            return await super().extend(request)

    def timed_out(timeout_s: float) -> int:
        workflow = WorkflowConfig(timeout_s=timeout_s, on_timeout="score")
        run = Run(engine=SlowEngine(), environment=Slow(turns=2), workflow=workflow, **ROOMY, num_tasks=2)
        steps(run, 1, seconds=1e6)
        return run.driver.player.env_tasks.num_timed_out

    assert timed_out(8.0) == 0, "of it 1.5 s, and twice a pause of 1 s at most, in each of two turns"
    assert timed_out(2.5) == 4


def test_step_does_not_wait_for_an_environment() -> None:
    environment = Hangs()
    run = dialogue(environment, **{**PARTIAL, "max_running": 2}, workflow=WorkflowConfig(timeout_s=1e6))

    async def go() -> None:
        for _ in range(2):
            assert "0-0" not in {r.rollout_id for g in (await run.step() or []) for r in g.rollouts}
        acting = run.cache.rollout("0-0")
        assert acting.state is RolloutState.ACTING and acting.stop_reason is StopReason.EOS
        assert not run.scheduler.to_interrupt(run.version), "it has no slot"
        saved = run.save()
        again = dialogue(Dialogue(), **{**PARTIAL, "max_running": 2})
        again.load(saved)
        assert again.cache.rollout("0-0").state is RolloutState.ACTING
        groups = [g for _ in range(2) for g in (await again.step() or [])]
        assert tokens_of(groups).items() <= expected.items() and 0 in {g.group_id for g in groups}
        # With max_staleness = 2 the third step is the last that can train it, so that waits.
        environment.free = True
        assert 0 in {g.group_id for g in await run.step() or []}
        await run.driver.abandon()

    expected = straight(12)
    virtual_time.run(go())


def test_a_function_of_ones_own_makes_an_environment(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def make(setup):\n    return setup.score(3)\n")
    named = Config.model_validate({"rollout": {"environment": f"{tmp_path}/mine.py:make"}})
    made = build_environment(EnvironmentSetup(named, None, lambda n: Dialogue(n), lambda task: False, 9))  # type: ignore
    assert isinstance(made, CustomEnvironment)
    assert isinstance(made.environment, Dialogue) and made.environment.turns == 3
    with pytest.raises(ValueError, match="rollout.environment.*a int without next, score, scores_singly"):
        build_environment(EnvironmentSetup(named, None, lambda n: n, lambda task: False, 9))  # type: ignore[arg-type]
