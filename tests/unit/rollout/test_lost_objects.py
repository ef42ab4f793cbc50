"""Environments of a class under the driver, whose process is killed: in a turn of theirs, in a snapshot, in
the policy's turn, at every token. By what workflow.resume says their rollouts go on, or begin again."""

from __future__ import annotations

import asyncio
import copy
import functools
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import tiny
from rollover import Observation
from rollover.config import Config, EngineConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.envs.class_environment import ClassEnvironment
from rollover.envs.protocol import EnvironmentSetup
from rollover.live_objects import hold, release
from rollover.rollout.lifecycle import EventKind
from rollover.types import DropReason, Group, RolloutState, StopReason
from unit.rollout.dialogue import TurnEngine
from unit.rollout.run import PARTIAL, Run, score_by_tokens

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
TOKENIZER = copy.deepcopy(tiny.tokenizer())
TOKENIZER.chat_template = TEMPLATE
MAX_NEW_TOKENS = 120
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "partial": PARTIAL,
    "budget": {**PARTIAL, "interrupt": "token_budget", "token_budget": 1},
}


class Kill:
    """In the threads of the user's code: at call `at` of it the process is killed, and the call never comes back."""

    def __init__(self) -> None:
        self.at = self.num = 0
        self.now: Callable[[], None] = lambda: None
        self.gone = threading.Event()

    def __call__(self) -> None:
        self.num += 1
        if self.num == self.at:
            self.now()
            self.gone.wait(60)


KILL = Kill()


class Game:
    """Tells its luck in every turn, which is drawn anew for every object, and is its reward."""

    def reset(self, answer: int) -> None:
        self.turns, self.num, self.luck = 2 + answer % 3, 0, random.randrange(10, 100)

    def step(self, message: str) -> Observation:
        KILL()
        self.num += 1
        return Observation(f"({self.luck})", reward=self.luck, done=self.num == self.turns)


class Stateless(Game):
    """Its luck is that of its task, so that the turns can be played again."""

    def reset(self, answer: int) -> None:
        super().reset(answer)
        self.luck = 10 + answer % 90


class Snapshot(Game):
    def snapshot(self) -> list[int]:
        KILL()
        return [self.num, self.luck]

    def restore(self, state: list[int]) -> None:
        KILL()
        self.num, self.luck = state


class Restart(Game):
    resume = "restart"


class DurableStateless(Stateless, Snapshot):
    """Of the same luck as Stateless: what equals a run of it that nobody killed."""


class RestartStateless(Stateless):
    resume = "restart"


CLASSES = {made.__name__: made for made in (Stateless, Snapshot, Restart, DurableStateless, RestartStateless)}


@pytest.fixture(autouse=True)
def _specs() -> Iterator[None]:
    yield
    KILL.at = 0


def process(made: type, *, engine: Any = None, workflow: dict[str, Any] | None = None, **config: Any) -> Run:
    spec = hold(made, made.__name__)
    try:
        tables = {"workflow": {"environment": spec, **(workflow or {})}, "rollout": {"max_new_tokens": MAX_NEW_TOKENS}}
        settings = Config.model_validate(tables)
        setup = EnvironmentSetup(settings, TOKENIZER, score_by_tokens, lambda task: False, len(TOKENIZER))
        environment = ClassEnvironment(setup, lambda *told: run.lifecycle.keep(*told))
    finally:
        release(spec)
    options = {"max_new_tokens": MAX_NEW_TOKENS, "group_size": 2, **config}
    engine = engine or TurnEngine(len(TOKENIZER))
    run = Run(engine=engine, environment=environment, workflow=settings.workflow, **options)
    return run


async def trained(run: Run, num_groups: int) -> list[Group]:
    found: list[Group] = []
    while len(found) < num_groups:
        groups = await run.step()
        assert groups
        found += groups
    return found


def killed(make: Callable[[], Run], story: list[int], num_groups: int = 8) -> tuple[list[Group], list[Run]]:
    """A run whose processes are killed at these calls of the user's code; what it trained, and its processes."""
    found: list[Group] = []
    processes = [make()]

    async def until_killed(run: Run, at: int) -> None:
        training = asyncio.ensure_future(trained(run, 10**6))
        loop = asyncio.get_running_loop()
        KILL.at, KILL.num, KILL.gone = at, 0, threading.Event()
        KILL.now = lambda: loop.call_soon_threadsafe(training.cancel) and None
        with suppress(asyncio.CancelledError):
            await training
        KILL.gone.set()
        await run.engine.close()

    for at in story:
        run = processes[-1]
        asyncio.run(until_killed(run, at))
        found += [event.group for event in run.events if event.kind is EventKind.CONSUME]
        processes.append(make())
        processes[-1].load(run.save())
    KILL.at = 0

    async def to_the_end(run: Run) -> list[Group]:
        groups = await trained(run, max(2, num_groups - len(found)))
        await run.driver.abandon()
        await run.engine.close()
        return groups

    found += asyncio.run(to_the_end(processes[-1]))
    return found, processes


def check(groups: list[Group]) -> None:
    """What each rollout was told is of one object, and so is its reward."""
    assert len({g.group_id for g in groups}) == len(groups)
    for rollout in (r for g in groups for r in g.rollouts if r.stop_reason is not StopReason.ERROR):
        said = TOKENIZER.decode([t for s in rollout.segments if not s.trainable for t in s.token_ids])
        lucks = re.findall(r"\((\d+)\)", said)
        assert len(set(lucks)) <= 1, "it met two objects"
        assert rollout.reward is not None and rollout.reward.score is not None
        if lucks:
            turns = len(lucks) + (rollout.stop_reason is StopReason.ENV_DONE)
            assert rollout.reward.score == int(lucks[0]) * turns


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["Stateless", "Snapshot", "Restart"])
def test_kill_at_any_time_keeps_object_and_ledger_consistent(kind: str, mode: str) -> None:
    story = [3, 25, 9, 20, 31]
    groups, processes = killed(lambda: process(CLASSES[kind], **MODES[mode]), story)
    check(groups)
    last = processes[-1]
    for run in processes:
        run.ledger.check(run.cache)
    stats = [run.environment.stats() for run in processes]  # type: ignore[attr-defined]
    restarted = last.ledger.dropped[DropReason.RESTARTED]
    assert restarted.rollouts == sum(of["episodes/restarted"] for of in stats)
    assert (restarted.tokens > 0) == (kind == "Restart")
    assert (sum(of["episodes/restored"] for of in stats) > 0) == (kind == "Snapshot")
    assert not sum(of["episodes/unsaved"] for of in stats)
    sampled = sum(r.num_sampled_tokens for g in last.cache.groups.values() for r in g.rollouts)
    metrics = last.ledger.metrics(last.cache)
    assert metrics["tokens/generated"] == metrics["tokens/trained"] + metrics["tokens/dropped"] + sampled


# On a model


def on_a_model(made: type, story: list[int], **config: Any) -> dict[str, list[int]]:
    def make() -> Run:
        engine = EmbeddedEngine(tiny.model(), EngineConfig(max_running=4), kv_on_resume="keep")
        return process(made, engine=engine, stop_token_ids=list(range(10, 22)), **config)

    groups, _ = killed(make, story, 6)
    return {r.rollout_id: r.token_ids() for g in groups for r in g.rollouts}


@functools.cache
def uninterrupted() -> dict[str, list[int]]:
    return on_a_model(Stateless, [], groups_per_step=8)


@pytest.mark.parametrize("mode", ["partial", "budget"])
@pytest.mark.parametrize("made", [Stateless, DurableStateless, RestartStateless])
def test_killed_and_interrupted_equals_uninterrupted(made: type, mode: str) -> None:
    """float32. With a budget of one token every token is followed by an interruption."""
    found, whole = on_a_model(made, [2, 17, 9, 23], **MODES[mode]), uninterrupted()
    both = found.keys() & whole.keys()
    assert len(both) >= 8 and any(len(tokens) > 20 for tokens in whole.values())
    assert {i: found[i] for i in both} == {i: whole[i] for i in both}


# What fails


class FailsLate(Game):
    """At the second turn of every other task, as often as `times` says."""

    resume = "restart"
    times = 0

    def reset(self, answer: int) -> None:
        super().reset(answer)
        self.fails = answer % 2 == 0

    def step(self, message: str) -> Observation:
        if self.num == 1 and self.fails and FailsLate.times:
            FailsLate.times -= 1
            raise OSError("gone")
        return super().step(message)


@pytest.mark.parametrize(("retries", "times"), [(1, 1), (1, 10**6), (0, 1)])
def test_lost_object_restarts_up_to_retries(retries: int, times: int) -> None:
    FailsLate.times = times
    run = process(FailsLate, workflow={"retries": retries}, group_size=4)
    check(asyncio.run(trained(run, 2)))
    stats = run.environment.stats() | run.driver.player.env_tasks.stats()  # type: ignore[attr-defined]
    finished = [e.rollout for e in run.events if e.kind is EventKind.SCORE and e.rollout]
    failed = [r for r in finished if r.stop_reason is StopReason.ERROR]
    assert all(r.reward is not None and r.reward.missing and "OSError: gone" in str(r.reward.error) for r in failed)
    assert stats["episodes/restarted"] == stats["episodes/retried"] and stats["episodes/failed"] == len(failed)
    num_failed = {(1, 1): 0, (0, 1): 1}.get((retries, times))
    assert len(failed) == num_failed if num_failed is not None else len(failed) >= 4
    assert stats["episodes/restarted"] == retries * max(len(failed), 1)
    assert run.count(EventKind.RESTART) == stats["episodes/restarted"]
    then = "it restarts" if retries else "its reward is missing"
    assert any(then in line and "OSError: gone" in line for line in run.said)


def test_unsaved_episode_restarts_after_a_kill() -> None:
    class Sometimes(Snapshot):
        def snapshot(self) -> list[int]:
            if self.luck % 2:
                raise OSError("the disk is full")
            return super().snapshot()

    groups, processes = killed(lambda: process(Sometimes, group_size=4, **PARTIAL), [45], 10)
    check(groups)
    stats = processes[0].environment.stats()  # type: ignore[attr-defined]
    after = processes[1].environment.stats()  # type: ignore[attr-defined]
    assert stats["episodes/unsaved"] > 0 and after["episodes/restarted"] > 0 and after["episodes/restored"] > 0
    assert sum("failed at snapshot: OSError: the disk is full" in line for line in processes[0].said) == 1


def test_the_siblings_of_one_that_begins_again_stay_as_they_are() -> None:
    def make() -> Run:
        return process(Restart, group_size=4, groups_per_step=1, **{**PARTIAL, "in_flight_groups": 3})

    run, fresh = make(), make()
    asyncio.run(trained(run, 2))
    fresh.load(run.save())
    before = {r.rollout_id: r for g in run.cache.groups.values() for r in g.rollouts}
    asyncio.run(begin(fresh))
    again = {e.rollout.rollout_id for e in fresh.events if e.kind is EventKind.RESTART and e.rollout}
    answered = {i for i, r in before.items() if any(not s.trainable for s in r.segments)}
    assert again == {i for i in answered if before[i].state is not RolloutState.READY} != set()
    held = {r.rollout_id: r for g in fresh.cache.groups.values() for r in g.rollouts}
    assert held.keys() == before.keys() and not any(held[i].segments for i in again)
    for rollout_id in before.keys() - again:
        assert held[rollout_id].token_ids() == before[rollout_id].token_ids()
        assert held[rollout_id].reward == before[rollout_id].reward
    dropped = sum(before[i].num_sampled_tokens for i in again)
    assert fresh.ledger.dropped[DropReason.RESTARTED].tokens == dropped > 0


async def begin(run: Run) -> None:
    run.driver.player.start_missing()
    await run.driver.abandon()
