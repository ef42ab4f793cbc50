"""Several turns under everything at once: environments that are slow, hang or raise, new weights, restarts.

On the fake engine at random, in virtual time; on a tiny model in float32, where what was interrupted equals what was
not, token for token.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import defaultdict
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
import virtual_time
from rollover.config import EngineConfig
from rollover.config.workflow import WorkflowConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.envs.build import CustomEnvironment
from rollover.envs.protocol import RunEnvironment, written
from rollover.rollout.lifecycle import Event
from rollover.types import DropReason, Group, Reward, Rollout, Segment, StopReason, Task
from unit.rollout.dialogue import TurnEngine
from unit.rollout.run import PARTIAL, Run

MODES: dict[str, dict[str, object]] = {
    "sync": {},
    "partial": PARTIAL,
    "few slots": {**PARTIAL, "max_running": 2},
    "budget": {**PARTIAL, "interrupt": "token_budget", "token_budget": 1},
    "continued": {**PARTIAL, "max_continuations": 1},
    "drop": {**PARTIAL, "max_staleness": 1, "on_stale": "drop"},
    "mask": {**PARTIAL, "max_staleness": 1, "on_stale": "mask"},
    "supplement": {**PARTIAL, "supplement": True, "in_flight_groups": 4},
    "fraction": {**PARTIAL, "complete_fraction": 0.5},
}
TIMEOUT_S = 5.0


class Talks(RunEnvironment):
    """Two tokens after each turn, for as many turns as the rollout's number says. What it takes is up to `rng`."""

    def __init__(self, rng: random.Random | None = None, token: int = 50) -> None:
        self.rng, self.token = rng, token

    async def next(self, rollout: Rollout) -> Segment | None:
        turn = sum(not s.trainable for s in rollout.segments)
        if self.rng is not None:
            await self._take_time(rollout, turn, self.rng)
        if turn < (rollout.group_id + rollout.sibling) % 4:
            return written(rollout, [self.token + turn] * 2)
        return None if rollout.group_id % 2 else written(rollout, [self.token] * (rollout.group_id % 3), done=True)

    async def _take_time(self, rollout: Rollout, turn: int, rng: random.Random) -> None:
        if rollout.sibling == 0 and rollout.group_id % 5 == 1 and turn:
            await asyncio.get_running_loop().create_future()  # for ever
        if rollout.sibling == 1 and rollout.group_id % 9 == 4 and turn:
            raise rng.choice([KeyError("no such page"), SystemExit(7), asyncio.CancelledError()])
        for _ in range(rng.choice([0, 0, 1, 7])):
            await asyncio.sleep(0)
        await asyncio.sleep(rng.choice([0, 0, 0.01, 1.0]))

    async def score(self, rollouts: list[Rollout]) -> list[Reward]:
        return [Reward(float(sum(r.token_ids()))) for r in rollouts]

    def scores_singly(self, task: Task) -> bool:
        return False


class Watched:
    """What was ever appended to a rollout, which nothing may change."""

    def __init__(self) -> None:
        self.seen: defaultdict[str, list[int]] = defaultdict(list)

    def on_event(self, event: Event) -> None:
        for rollout in event.group.rollouts if event.rollout is None else [event.rollout]:
            tokens, before = rollout.token_ids(), self.seen[rollout.rollout_id]
            assert tokens[: len(before)] == before, "append-only"
            self.seen[rollout.rollout_id] = tokens


def erratic(mode: Mapping[str, object], seed: int, workflow: WorkflowConfig, watched: Watched) -> Run:
    environment = CustomEnvironment(Talks(random.Random(seed)), 1000)
    run = Run(
        engine=TurnEngine(),
        environment=environment,
        workflow=workflow,
        **{"max_new_tokens": 60, "group_size": 3, **mode},
    )  # type: ignore[arg-type]
    run.lifecycle.listeners = [watched.on_event]
    return run


@functools.cache
def straight() -> dict[str, list[int]]:
    """What each rollout is where nothing takes time, hangs or raises."""
    run = Run(engine=TurnEngine(), environment=Talks(), max_new_tokens=60, group_size=3)
    return {r.rollout_id: r.token_ids() for batch in run.steps(20) for g in batch for r in g.rollouts}


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(list(MODES)),
    st.integers(0, 2**32),
    st.sampled_from(["missing", "score"]),
    st.lists(st.sampled_from(["go on", "interrupt", "restart", "interrupt for good"]), min_size=3, max_size=7),
)
def test_whatever_happens_every_token_is_in_one_account(
    mode: str, seed: int, on_timeout: str, story: list[str]
) -> None:
    workflow = WorkflowConfig.model_validate({"timeout_s": TIMEOUT_S, "on_timeout": on_timeout})
    watched, _ = Watched(), straight()

    async def go() -> None:
        run = erratic(MODES[mode], seed, workflow, watched)
        for number, what in enumerate(story):
            if what == "interrupt for good":
                collecting = asyncio.ensure_future(run.step())
                for _ in range(seed % 40):
                    await asyncio.sleep(0)
                run.driver.interrupt_for_good()
                groups, what = await collecting or [], "restart"
            else:
                groups = await run.step() or []
            for rollout in (r for g in groups for r in g.rollouts):
                check_whole(rollout)
            await run.driver.interrupt_all()
            assert not run.cache.running()
            if what == "restart":
                again = erratic(MODES[mode], seed + number, workflow, watched)
                again.load(run.save())
                await run.driver.abandon()
                assert not run.driver.player.env_tasks
                run = again
            run.lifecycle.check()
        await run.driver.abandon()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "nothing is left running"
        sampled = sum(r.num_sampled_tokens for g in run.cache.groups.values() for r in g.rollouts)
        metrics = run.ledger.metrics(run.cache)
        assert metrics["tokens/held"] == sampled
        assert metrics["tokens/generated"] == metrics["tokens/trained"] + metrics["tokens/dropped"] + sampled
        assert not run.ledger.dropped[DropReason.FAILED].groups

    virtual_time.run(go())


@pytest.mark.parametrize("interrupt", ["never", "on_weight_update"])
@pytest.mark.parametrize("seed", range(3))
def test_beside_the_trainer_what_acts_goes_on_over_new_weights(interrupt: str, seed: int) -> None:
    watched, _ = Watched(), straight()
    mode = {"overlap": True, "interrupt": interrupt, "max_staleness": 2, "in_flight_groups": 6}
    over_a_hand_over = 0

    async def go() -> None:
        nonlocal over_a_hand_over
        run = erratic(mode, seed, WorkflowConfig(timeout_s=TIMEOUT_S), watched)
        for _ in range(5):
            for rollout in (r for g in await run.driver.collect(run.version) or [] for r in g.rollouts):
                check_whole(rollout)
            run.driver.generate_ahead(run.version)
            await asyncio.sleep(0.3)  # the trainer trains
            if interrupt == "never":
                await run.driver.drain()
            over_a_hand_over += len(run.driver.player.env_tasks)
            run.version += 1
            await run.engine.load_weights(run.version, ())
            run.driver.on_new_version(run.version)
            run.lifecycle.check()
        await run.driver.interrupt_all()
        assert not run.cache.running()
        await run.driver.abandon()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "nothing is left running"

    virtual_time.run(go())
    assert over_a_hand_over, "nothing acted while weights were handed over"


def check_whole(rollout: Rollout) -> None:
    expected = straight()[rollout.rollout_id]
    if rollout.stop_reason is StopReason.TIMEOUT:
        assert rollout.sibling == 0 and rollout.group_id % 5 == 1
        assert rollout.token_ids() == expected[: rollout.num_tokens] and rollout.segments[-1].trainable
    elif rollout.stop_reason is StopReason.ERROR:
        assert rollout.sibling == 1 and rollout.group_id % 9 == 4
        assert rollout.token_ids() == expected[: rollout.num_tokens]
        assert rollout.reward is not None and rollout.reward.missing
    else:
        assert rollout.token_ids() == expected


# On a model


class Slowly(Talks):
    """Beside the run: other rollouts stop, are interrupted and get new weights while it is at work."""

    async def next(self, rollout: Rollout) -> Segment | None:
        await asyncio.sleep(1 + rollout.sibling)
        return await super().next(rollout)


def on_a_model(kv_on_resume: str, environment: Talks, **config: object) -> dict[str, list[int]]:
    engine = EmbeddedEngine(tiny.model(), EngineConfig(max_running=4), kv_on_resume=kv_on_resume)  # type: ignore[arg-type]
    # Turns of some eight tokens.
    options = {"max_new_tokens": 48, "stop_token_ids": list(range(10, 22)), **config}
    run = Run(engine=engine, environment=environment, **options)  # type: ignore[arg-type]

    async def go() -> dict[str, list[int]]:
        found: list[Group] = []
        while len(found) < 6:
            found += await run.step() or []
            await run.driver.interrupt_all()
        assert kv_on_resume != "keep" or engine.stats()["kv/kept_tokens"] > 0
        await run.driver.abandon()
        await engine.close()
        return {r.rollout_id: r.token_ids() for g in found for r in g.rollouts}

    return virtual_time.run(go())


@functools.cache
def uninterrupted() -> dict[str, list[int]]:
    return on_a_model("recompute", Talks(), groups_per_step=8)


@pytest.mark.parametrize(
    ("mode", "kv_on_resume", "environment"),
    [
        ("partial", "recompute", Talks()),
        ("budget", "recompute", Talks()),
        ("budget", "keep", Talks()),
        ("budget", "salt", Talks()),
        ("sync", "recompute", Slowly()),
        ("partial", "keep", Slowly()),
        ("budget", "keep", Slowly()),
    ],
)
def test_interrupted_at_every_token_and_turn_equals_uninterrupted(
    mode: str, kv_on_resume: str, environment: Talks
) -> None:
    """With a budget of one token every token is followed by an interruption, those at the end of a turn included."""
    found = on_a_model(kv_on_resume, environment, **MODES[mode])
    whole = uninterrupted()
    assert found.keys() & whole.keys() and any(len(tokens) > 20 for tokens in whole.values())
    assert {i: t for i, t in found.items() if i in whole} == {i: t for i, t in whole.items() if i in found}
