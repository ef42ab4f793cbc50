"""Generation while training, simulated: against the real driver, against figures by hand, and in bound at random."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_engine import FakeEngine
from rollover.config import PlanConfig
from rollover.config.load import load_config
from rollover.config.rollout import RolloutConfig
from rollover.rollout.lifecycle import Event
from rollover.sim.plan import Figures, make_plan
from rollover.sim.report import planned_trace
from rollover.sim.simulate import Outcome, Simulation
from rollover.sim.workload import Workload
from rollover.track.trace import PUBLISH, engine_visits
from unit.sim.driven import driver_over

ROOT = Path(__file__).parents[3]
STEPS = 8


def described(event: Event) -> tuple:
    rollout = event.rollout
    tokens = None
    if rollout is not None:
        segments = tuple((s.policy_version, s.num_tokens, s.stop_reason) for s in rollout.segments)
        tokens = (rollout.sibling, segments)
    return event.kind, event.group.group_id, tokens, event.reason


class Drawn(Workload):
    """Lengths and seconds of training, drawn in the open: both sides look them up."""

    def __init__(self, seed: int, group_size: int, longest: int) -> None:
        self.seed, self.group_size, self.longest = seed, group_size, longest

    def lengths(self, task: int) -> list[int]:
        rng = random.Random(f"{self.seed}/{task}")
        return [rng.choice([1, 2, rng.randint(1, self.longest), self.longest]) for _ in range(self.group_size)]

    def train_steps(self, version: int) -> int:
        """Decode steps that training takes."""
        return random.Random(f"{self.seed}/train/{version}").choice([0, 1, 3, 9, 20])


class DrawnSimulation(Simulation):
    def train_seconds(self, tokens: int) -> float:
        return float(self.workload.train_steps(self.version))  # type: ignore[attr-defined]


def simulated(config, max_running: int, seed: int, publish_every: int, num_tasks: int | None) -> list[tuple]:
    events: list[tuple] = []
    plan = PlanConfig(steps=STEPS, decode_batches=[1], decode_step_s=[1.0], prefill_tokens_per_s=1e15,
                      prefill_min_s=0, weight_sync_s=0, trainers=1)  # fmt: skip
    workload = Drawn(seed, config.group_size, config.max_new_tokens + 2)
    DrawnSimulation(
        config, plan, max_running, workload, [lambda e: events.append(described(e))], num_tasks, publish_every
    ).run()
    return events


class Stepped(FakeEngine):
    """Makes at most `steps_left` steps, each after whatever the one before led to."""

    steps_left = float("inf")

    async def _run(self) -> None:
        turns = 16
        while self._running:
            await asyncio.sleep(0)
            turns = turns - 1 if self.steps_left > 0 else 16
            if turns == 0:
                turns = 16
                self.steps_left -= 1
                self._step()

    async def make(self, steps: int) -> None:
        """So many steps, or fewer if nothing is left to run; and whatever they lead to."""
        self.steps_left, quiet = steps, 0
        while quiet < 20:
            quiet = 0 if self.steps_left > 0 and self._running else quiet + 1
            await asyncio.sleep(0)
        self.steps_left = float("inf")


def driven(config, max_running: int, seed: int, publish_every: int, num_tasks: int | None) -> list[tuple]:
    events: list[tuple] = []
    workload = Drawn(seed, config.group_size, config.max_new_tokens + 2)

    driver = driver_over(config, max_running, workload, num_tasks, lambda e: events.append(described(e)), Stepped)
    engine = driver.engine
    assert isinstance(engine, Stepped)

    async def run() -> None:
        for version in range(STEPS):
            if not await driver.collect(version):
                break
            driver.generate_ahead(version)
            await engine.make(workload.train_steps(version))
            if (version + 1) % publish_every == 0:
                if config.interrupt == "never":
                    await driver.drain()
                await engine.load_weights(version + 1, ())
            driver.on_new_version(version + 1)
        driver.lifecycle.listeners = []
        await driver.abandon()

    asyncio.run(run())
    return events


@st.composite
def overlapped(draw: st.DrawFn) -> tuple[RolloutConfig, int]:
    """(configuration, publish_every): every mode that the rules allow with overlap."""
    groups, staleness = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    on_stale = draw(st.sampled_from(["", "finish_first", "mask"]))
    most = (1 + staleness) * groups + (4 if on_stale == "mask" else 0)
    config = RolloutConfig(
        groups_per_step=groups,
        group_size=draw(st.integers(1, 3)),
        max_new_tokens=draw(st.integers(2, 30)),
        overlap=True,
        interrupt=draw(st.sampled_from(["never", "on_weight_update"])),
        in_flight_groups=draw(st.just("auto") | st.integers(groups, most)),
        complete_fraction=draw(st.sampled_from([0.5, 1.0])),
        max_staleness=staleness,
        on_stale=on_stale,
        kv_on_resume=draw(st.sampled_from(["recompute", "keep", "salt"])),
        order=draw(st.sampled_from(["oldest_first", "longest_first", "fifo"])),
    )
    return config, draw(st.integers(1, 1 + staleness))


RANDOM = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@RANDOM
@given(overlapped(), st.integers(1, 8), st.integers(0, 1000), st.none() | st.integers(0, 20))
def test_the_same_trace_as_the_real_driver(mode, max_running, seed, num_tasks) -> None:
    config, publish_every = mode
    arguments = (config, max_running, seed, publish_every, num_tasks)
    assert simulated(*arguments) == driven(*arguments)


@RANDOM
@given(overlapped(), st.data())
def test_the_ledger_balances_and_the_bound_holds(mode, data) -> None:
    """Simulation.run checks the ledger; a planner that hangs would run out of the test's time."""
    config, publish_every = mode
    plan = PlanConfig(
        steps=12,
        seed=data.draw(st.integers(0, 99)),
        engines=data.draw(st.integers(1, 3)),
        trainers=data.draw(st.integers(0, 2)),
        median_tokens=4,
        p99_tokens=data.draw(st.sampled_from([5.0, 40.0])),
        decode_batches=[1, 8],
        decode_step_s=[0.1, 0.3],
        prefill_tokens_per_s=1000,
        train_tokens_per_s=data.draw(st.sampled_from([10.0, 200.0, 1e4])),
        weight_sync_s=data.draw(st.sampled_from([0.0, 0.5])),
        reward_s=data.draw(st.sampled_from([0.0, 2.0])),
    )
    starts: Counter[str] = Counter()

    def on_event(event: Event) -> None:
        if event.kind.value in ("start", "park", "drop"):
            starts[event.kind.value] += 1

    workload = Workload(plan, config.group_size, config.max_new_tokens)
    simulation = Simulation(config, plan, 4, workload, [on_event], publish_every=publish_every)
    out = simulation.run()
    assert len(out.steps) == plan.steps
    assert max(max(s.staleness, default=0) for s in out.steps) <= config.staleness_bound(publish_every)
    ledger = out.ledger
    assert ledger["tokens/generated"] == ledger["tokens/trained"] + ledger["tokens/dropped"] + ledger["tokens/held"]
    assert starts["park"] == 0 and (config.on_stale == "mask" or starts["drop"] == 0)
    assert sum(s.seconds for s in out.steps) == pytest.approx(simulation.now)
    for step in out.steps:
        assert step.overlapped_s <= step.generating_s + 1e-9 and step.generating_s <= step.seconds + 1e-9
        assert step.overlapped_s <= step.train_s + 1e-9
    if not any(s.trained_tokens for s in out.steps[2:]):
        assert config.on_stale == "mask"
        with pytest.raises(ValueError, match="Raise it"):
            Figures.from_outcome(out, plan)
        return
    figures = Figures.from_outcome(out, plan)
    for share in (figures.slots_idle, figures.engines_idle, figures.trainers_idle):
        assert -1e-6 <= share <= 1


# Figures by hand: one engine, answers of 10 tokens, a second a token however many run, 4 groups of 2 answers a step.


class Constant(Workload):
    def __init__(self, tokens: int, group_size: int) -> None:
        self.tokens, self.group_size = tokens, group_size

    def lengths(self, task: int) -> list[int]:
        return [self.tokens] * self.group_size


def constant(
    train_s: float, *, slots: int = 8, publish_every: int = 1, plan: dict | None = None, **rollout: object
) -> Outcome:
    """A step's training takes train_s; the slots hold one step's answers."""
    config = RolloutConfig.model_validate(
        {"groups_per_step": 4, "group_size": 2, "max_new_tokens": 50, "overlap": True, "max_staleness": 1,
         "in_flight_groups": 8, **rollout}
    )  # fmt: skip
    assumed = PlanConfig.model_validate(
        {"decode_batches": [1], "decode_step_s": [1.0], "prefill_tokens_per_s": 1e15, "prefill_min_s": 0,
         "prompt_tokens": 5, "train_tokens_per_s": 4 * (5 + 2 * 10) / train_s, "weight_sync_s": 0, "steps": 10,
         "trainers": 1, **(plan or {})}
    )  # fmt: skip
    return Simulation(config, assumed, slots, Constant(10, 2), publish_every=publish_every).run()


def phases(outcome: Outcome) -> list[tuple[float, ...]]:
    return [tuple(round(s, 6) for s in (x.generate_s, x.train_s, x.sync_s)) for x in outcome.steps]


@pytest.mark.parametrize("train_s", [4.0, 10.0, 25.0])
def test_one_step_off_takes_the_longer_phase(train_s: float) -> None:
    out = constant(train_s, interrupt="never")
    drain_s = max(0.0, 10 - train_s)  # the next step's answers end under the weights they began with
    assert phases(out) == [(10, train_s, drain_s)] + 9 * [(0, train_s, drain_s)]
    assert [s.staleness for s in out.steps] == [{0: 80}] + 9 * [{1: 80}]
    assert all(s.generating_s == pytest.approx(10 + 10 * (s.version == 0)) for s in out.steps)
    assert all(s.overlapped_s == pytest.approx(min(10, train_s)) for s in out.steps)
    assert out.partial_rollouts == 0


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_fully_async_with_a_slow_trainer_reaches_the_bound(staleness: int) -> None:
    out = constant(25, interrupt="on_weight_update", max_staleness=staleness, in_flight_groups=4 * (1 + staleness))
    assert phases(out)[0] == (10, 25, 0) and phases(out)[staleness + 2 :] == (8 - staleness) * [(0, 25, 0)]
    assert [s.staleness for s in out.steps[staleness + 2 :]] == (8 - staleness) * [{staleness: 80}]


def test_fully_async_gets_new_weights_in_flight() -> None:
    """Training takes 4 s of the next step's 10: each answer has 4 tokens under the old weights and 6 under the new."""
    out = constant(4, interrupt="on_weight_update")
    assert phases(out) == [(10, 4, 0)] + 9 * [(6, 4, 0)]
    assert [s.staleness for s in out.steps] == [{0: 80}] + 9 * [{1: 32, 0: 48}]
    assert out.partial_rollouts == 9 * 8 and out.reprefilled_tokens > 0


def test_weight_sync_in_flight_costs_pause_and_prefill() -> None:
    """A hand-over of 2 s; then, unless it is kept, 4 prompts of 5 and 8 answers of 3 tokens at 22 a second: 2 s.

    3 whole steps have passed in the 4 s of training, and before them the prefill of the prompts.
    """
    plan = {"weight_sync_s": 2, "prefill_tokens_per_s": 22}
    kept = constant(4, interrupt="on_weight_update", kv_on_resume="keep", plan=plan)
    again = constant(4, interrupt="on_weight_update", plan=plan)
    first = 20 / 22  # of 4 prompts: they join at the beginning of each step's generation
    longest = [round(s.generate_s, 3) for s in kept.steps[2:]]
    assert longest == [round(6 + first, 3)] * 8
    assert [round(s.generate_s, 3) for s in again.steps[2:]] == [round(6 + first + 2, 3)] * 8
    assert kept.reprefilled_tokens == 0
    assert again.steps[2].staleness == kept.steps[2].staleness == {1: 24, 0: 56}


def test_on_shared_devices_both_have_half_the_speed_meanwhile() -> None:
    out = constant(10, interrupt="never", plan={"trainers": 0})
    assert phases(out) == [(10, 20, 0)] + 9 * [(0, 20, 0)]
    assert all(s.overlapped_s == pytest.approx(20) for s in out.steps)
    figures = Figures.from_outcome(out, PlanConfig(trainers=0))
    assert figures.engines_idle == pytest.approx(0) and figures.trainers_idle == pytest.approx(0)
    assert out.slot_s == pytest.approx(8 * (10 + 10 * 20))
    # 6 s of training, alone: 12 s here, in which 6 tokens come; the other 4 come at full speed.
    assert phases(constant(6, interrupt="never", plan={"trainers": 0}))[3] == (0, 12, 4)


def test_idle_engines_leave_shared_devices_to_the_trainer() -> None:
    # The next step's 10 tokens take 20 s, in which 10 of the 25 s of training are done; the other 15 go at full speed.
    out = constant(25, interrupt="never", plan={"trainers": 0})
    assert phases(out)[3] == (0, 35, 0)
    assert [s.train_s for s in out.steps] == pytest.approx([35] * 10)
    assert all(s.overlapped_s == pytest.approx(20) for s in out.steps)


def test_a_decode_step_under_way_goes_on_at_the_new_speed() -> None:
    """2.25 s of training, alone, end in the middle of a token."""
    out = constant(2.25, interrupt="never", plan={"trainers": 0})
    assert phases(out)[3] == (0, 4.5, 7.75)
    assert out.slot_s == pytest.approx(8 * (10 + 10 * 12.25))


def test_prefill_on_shared_devices_takes_twice_as_long() -> None:
    # 4 prompts of 5 tokens: 1 s alone, 2 s here; then 9 tokens in the 20 s of training, and the last one alone.
    out = constant(10, interrupt="never", plan={"trainers": 0, "prefill_tokens_per_s": 20})
    assert phases(out)[3] == (0, 20, 1)
    # 6 groups have slots: 3 s of prefill and 10 of tokens. Then the other 2 start, and as a step is taken that moment,
    # 4 new ones with them: 3 s of prefill and 10 of tokens at half the speed.
    plan = {"trainers": 0, "prefill_tokens_per_s": 10}
    out = constant(50, interrupt="on_weight_update", slots=12, max_staleness=2, plan=plan)
    assert out.steps[0].generate_s == pytest.approx(13) and out.steps[0].overlapped_s == pytest.approx(26)


def test_weights_every_few_steps_age_by_so_many_versions() -> None:
    out = constant(25, interrupt="never", max_staleness=3, in_flight_groups=8, publish_every=2)
    # A group starts while the step before the last one before its own is trained, under weights 0 or 1 versions old.
    assert [dict(s.staleness) for s in out.steps[4:]] == [{2: 80}, {3: 80}] * 3
    assert all(s.sync_s == 0 for s in out.steps)
    charged = constant(25, interrupt="on_weight_update", max_staleness=3, publish_every=2, plan={"weight_sync_s": 3})
    assert [s.sync_s for s in charged.steps] == pytest.approx([0, 3] * 5)


def test_weights_every_few_steps_without_overlap() -> None:
    out = constant(5, overlap=False, interrupt="when_enough", max_staleness=2, publish_every=2, in_flight_groups=4,
                   plan={"weight_sync_s": 3})  # fmt: skip
    assert [s.sync_s for s in out.steps] == [0, 3] * 5
    assert [dict(s.staleness) for s in out.steps] == [{0: 80}, {1: 80}] * 5


def test_a_slow_reward_is_waited_for_while_others_run() -> None:
    """Scores 30 s late: without overlap a step takes 10 + 30 + 10; with it at most what the bound makes it wait."""
    turns = constant(10, overlap=False, interrupt="never", max_staleness=0, in_flight_groups=4, plan={"reward_s": 30})
    ahead = constant(10, interrupt="on_weight_update", max_staleness=3, in_flight_groups=16, plan={"reward_s": 30})
    assert [s.seconds for s in turns.steps] == pytest.approx([50] * 10)
    # Four steps' worth is in flight, one after the other in the slots: one every 12.5 s of the 50 of its way.
    assert sum(s.seconds for s in ahead.steps[4:8]) == pytest.approx(50)
    # One step's worth in flight is generated while the trainer trains, and then its scores alone are waited for.
    one = constant(10, interrupt="never", in_flight_groups=4, plan={"reward_s": 30})
    assert [round(s.score_s, 6) for s in one.steps] == [30] * 10 and phases(one)[1:] == [(0, 10, 0)] * 9


@pytest.mark.parametrize("recipe", ["one_step_off", "fully_async", "axolotl_async"])
def test_the_recipes_are_planned(recipe: str) -> None:
    config = load_config([ROOT / "configs" / f"{recipe}.toml"], [("plan.steps", "8"), ("plan.trainers", "1")]).config
    plan = make_plan(config)
    assert 0 < plan.figures.staleness_max <= config.rollout.max_staleness
    assert plan.speedup > 1 and plan.figures.trainers_idle < plan.synchronous.trainers_idle
    for variant in plan.variants:
        assert variant.figures.staleness_max <= variant.max_staleness


def test_variants_overlap_and_respect_publish_every() -> None:
    changes = [("plan.steps", "8"), ("plan.trainers", "1"), ("train.publish_every", "3")]
    plan = make_plan(load_config([ROOT / "configs" / "fully_async.toml"], changes).config)
    assert {v.max_staleness for v in plan.variants} == {0, 2, 4, 8}
    ahead = [v for v in plan.variants if v.max_staleness]
    assert max(v.speedup for v in ahead) > 1.1 and all(v.figures.staleness_mean > 0 for v in ahead)


def test_one_step_off_variants_never_interrupt() -> None:
    changes = [("plan.steps", "8"), ("plan.trainers", "1"), ("plan.train_tokens_per_s", "3000")]
    plan = make_plan(load_config([ROOT / "configs" / "one_step_off.toml"], changes).config)
    assert all(v.figures.partial_share == 0 for v in plan.variants)


def test_timeline_has_versions_and_weight_syncs() -> None:
    config = load_config([ROOT / "configs" / "fully_async.toml"], [("plan.trainers", "1")]).config
    plan = config.plan.model_copy(update={"steps": 6, "train_tokens_per_s": 3000.0})
    workload = Workload(plan, 8, 128)
    events = planned_trace(config.rollout, plan, 64, workload, 2)
    assert [e.version for e in events if e.kind == PUBLISH] == [2, 4, 6]
    assert {v for s in engine_visits(events) for v, _ in s.segments} == {0, 2, 4}
    assert any(len(s.segments) > 1 for s in engine_visits(events))
