"""The simulator against the real driver, and against closed forms."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_engine import FakeEngine
from rollover.config import PlanConfig
from rollover.config.rollout import RolloutConfig
from rollover.rollout.lifecycle import Event
from rollover.sim.fleet import step_seconds
from rollover.sim.simulate import Outcome, Simulation
from rollover.sim.workload import Turns, Workload
from unit.rollout.test_properties import configs
from unit.sim.driven import driver_over

STEPS = 8


def described(event: Event) -> tuple:
    rollout = event.rollout
    tokens = None if rollout is None else (rollout.sibling, rollout.num_tokens, tuple(rollout.versions))
    return event.kind, event.group.group_id, tokens, event.reason


class Fixed(Workload):
    """Lengths drawn by task, in the open: the fake engine looks them up."""

    def __init__(self, seed: int, group_size: int, longest: int) -> None:
        self.seed, self.group_size, self.longest = seed, group_size, longest

    def lengths(self, task: int) -> list[int]:
        rng = random.Random(f"{self.seed}/{task}")
        return [rng.randint(1, self.longest) for _ in range(self.group_size)]


PLAN = PlanConfig(steps=STEPS, decode_batches=[1], decode_step_s=[1.0], prefill_tokens_per_s=1e12, prefill_min_s=0)


def simulated(
    config: RolloutConfig, max_running: int, seed: int, num_tasks: int | None, plan: PlanConfig = PLAN
) -> list[tuple]:
    events: list[tuple] = []
    workload = Fixed(seed, config.group_size, config.max_new_tokens + 2)
    Simulation(config, plan, max_running, workload, [lambda e: events.append(described(e))], num_tasks).run()
    return events


def driven(
    config: RolloutConfig, max_running: int, seed: int, num_tasks: int | None, turns: Turns | None = None
) -> list[tuple]:
    events: list[tuple] = []
    workload = Fixed(seed, config.group_size, config.max_new_tokens + 2)

    engine = partial(FakeEngine, turns_between_steps=16)
    driver = driver_over(config, max_running, workload, num_tasks, lambda e: events.append(described(e)), engine, turns)

    async def run() -> None:
        for version in range(STEPS):
            if not await driver.collect(version):
                return
            await driver.engine.load_weights(version + 1, ())
            driver.on_new_version(version + 1)

    asyncio.run(run())
    return events


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs(), st.integers(1, 8), st.integers(0, 1000), st.none() | st.integers(0, 20))
def test_the_same_trace_as_the_real_driver_on_the_fake_engine(config, max_running, seed, num_tasks) -> None:
    """DESIGN.md, test 8: every event, in the same order, with the same tokens and versions."""
    assert simulated(config, max_running, seed, num_tasks) == driven(config, max_running, seed, num_tasks)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs(), st.integers(1, 8), st.integers(0, 1000), st.none() | st.integers(0, 20), st.integers(2, 4))
def test_an_instant_environment_keeps_the_trace(config, max_running, seed, num_tasks, num):
    plan = PLAN.model_copy(update={"turns": num, "tool_s": 0.0, "tool_tokens": 2})
    ours = simulated(config, max_running, seed, num_tasks, plan)
    assert ours == driven(config, max_running, seed, num_tasks, Turns(plan))


# Closed forms


def outcome(config: dict, plan: dict, slots: int = 10**6) -> tuple[Outcome, Workload]:
    rollout = RolloutConfig.model_validate({"groups_per_step": 16, "group_size": 4, "max_new_tokens": 2000, **config})
    settings_ = PlanConfig.model_validate({"prefill_tokens_per_s": 1e12, "prefill_min_s": 0, "steps": 20, **plan})
    workload = Workload(settings_, rollout.group_size, rollout.max_new_tokens)
    return Simulation(rollout, settings_, slots, workload).run(), workload


def test_a_synchronous_phase_lasts_as_long_as_the_longest_answer() -> None:
    constant = {"decode_batches": [1], "decode_step_s": [0.5]}
    out, workload = outcome({}, constant)
    for i, step in enumerate(out.steps):
        longest = max(max(workload.lengths(task)) for task in range(16 * i, 16 * (i + 1)))
        assert step.generate_s == pytest.approx(0.5 * longest)
        assert step.trained_tokens == sum(sum(workload.lengths(task)) for task in range(16 * i, 16 * (i + 1)))
        assert set(step.staleness) == {0}


def test_with_every_slot_busy_the_rate_is_that_of_full_batches() -> None:
    """The work-conserving bound: so much in flight, and no bound on staleness, that no slot ever waits."""
    linear = {"decode_batches": [1, 65], "decode_step_s": [0.02, 0.1], "steps": 40}
    partial = {"interrupt": "when_enough", "in_flight_groups": 200, "max_staleness": 60, "kv_on_resume": "keep"}
    out, _ = outcome(partial, linear, slots=32)
    generated = sum(s.generated_tokens for s in out.steps[10:])
    seconds = sum(s.generate_s for s in out.steps[10:])
    full = 32 / (0.02 + 31 * 0.08 / 64)
    assert generated / seconds == pytest.approx(full, rel=1e-3)
    assert out.slot_s / (32 * sum(s.generate_s for s in out.steps)) == pytest.approx(1, rel=1e-3)


def test_durations_of_train_prefill_score_and_sync() -> None:
    plan = {"decode_batches": [1], "decode_step_s": [0.1], "prefill_tokens_per_s": 100, "prompt_tokens": 50,
            "train_tokens_per_s": 10, "trainers": 4, "weight_sync_s": 3, "reward_s": 7}  # fmt: skip
    out, workload = outcome({"groups_per_step": 1, "group_size": 2}, plan)
    for i, step in enumerate(out.steps):
        lengths = workload.lengths(i)
        assert step.generate_s + step.score_s == pytest.approx(0.1 * max(lengths) + 0.5 + 7)
        assert step.train_s == pytest.approx((sum(lengths) + 50) / 40) and step.sync_s == 3


def test_prefill_cost_of_kept_and_recomputed_kv() -> None:
    partial = {"interrupt": "when_enough", "in_flight_groups": 48, "max_staleness": 2}
    kept, _ = outcome({**partial, "kv_on_resume": "keep"}, {})
    again, _ = outcome(partial, {})
    assert kept.reprefilled_tokens == 0 and again.reprefilled_tokens > 0


def test_what_joins_together_is_prefilled_together() -> None:
    """16 prompts of 50 tokens at 1,000 a second take 0.8 s; one of them takes the shortest prefill, 0.2 s."""
    plan = {"decode_batches": [1], "decode_step_s": [0.1], "prefill_tokens_per_s": 1000, "prefill_min_s": 0.2,
            "prompt_tokens": 50, "steps": 2}  # fmt: skip
    for groups, prefill_s in ((16, 0.8), (1, 0.2)):
        out, workload = outcome({"groups_per_step": groups}, plan)
        longest = max(max(workload.lengths(task)) for task in range(groups))
        assert out.steps[0].generate_s == pytest.approx(0.1 * longest + prefill_s)


def test_tools_delay_a_synchronous_phase_and_cost_prefill() -> None:
    """Two turns each, no tool works while its rollout decodes, and the longest episode ends last."""
    constant = {"decode_batches": [1], "decode_step_s": [0.5], "turns": 2, "tool_s": 10.0, "tool_tokens": 7}
    plain, _ = outcome({}, constant | {"turns": 1, "tool_s": 0})
    out, workload = outcome({}, constant)
    for i, step in enumerate(out.steps):
        tasks = [n for task in range(16 * i, 16 * (i + 1)) for n in workload.lengths(task)]
        assert step.generate_s == pytest.approx(max(0.5 * n + 10.0 * (n > 1) for n in tasks))
        assert step.trained_tokens == plain.steps[i].trained_tokens == sum(tasks)
    assert out.reprefilled_tokens == 0 and out.partial_rollouts == 0
    answers = 7 * sum(n > 1 for i in range(20 * 16) for n in workload.lengths(i))
    assert out.prefill_tokens == plain.prefill_tokens + answers


def test_while_tools_work_other_rollouts_have_the_slots() -> None:
    """One slot an engine, tools that take as long as a turn: with more in flight the engine hardly waits."""
    plan = {"decode_batches": [1], "decode_step_s": [0.1], "turns": 4, "tool_s": 2.0, "tool_tokens": 1, "steps": 30}
    busy = {"interrupt": "when_enough", "in_flight_groups": 36, "max_staleness": 8, "kv_on_resume": "keep"}
    alone, _ = outcome({"groups_per_step": 1, "group_size": 2}, plan, slots=2)
    many, _ = outcome({"groups_per_step": 4, "group_size": 2, **busy}, plan, slots=2)
    idle = [1 - o.slot_s / (o.slots * sum(s.generate_s for s in o.steps)) for o in (alone, many)]
    assert idle[0] > 0.4 and idle[1] < 0.1


def test_an_episode_ends_at_the_longest_rollout() -> None:
    out, workload = outcome({"max_new_tokens": 30}, {"turns": 3, "tool_s": 0.0, "tool_tokens": 12, "steps": 2})
    assert all(step.trained_tokens <= 64 * 30 for step in out.steps) and out.ledger["tokens/trained"] > 0
    assert max(workload.lengths(0)) <= 30


def test_more_engines_share_the_work() -> None:
    one, _ = outcome({}, {"engines": 1}, slots=64)
    eight, _ = outcome({}, {"engines": 8}, slots=8)
    assert sum(s.generate_s for s in eight.steps) < sum(s.generate_s for s in one.steps)
    assert eight.ledger["tokens/trained"] == one.ledger["tokens/trained"]


def test_step_seconds_between_and_beyond_the_points() -> None:
    plan = PlanConfig(decode_batches=[1, 3, 5], decode_step_s=[1.0, 2.0, 4.0])
    assert step_seconds(plan, 7).tolist() == [1, 1, 1.5, 2, 3, 4, 5, 6]
