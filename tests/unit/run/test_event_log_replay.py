"""What the journal tells, read back: over random runs that are killed at random moments the state is the same again,
and after a roll-back every token that is trained is in bound. And the timer of those who write it."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.checkpoint.journal import Record
from rollover.config.rollout import RolloutConfig
from rollover.rollout.lifecycle import Event, EventKind, Lifecycle, RunClock, is_complete
from rollover.run.event_log import EventLog, Timer
from rollover.run.resume import Replay, RollBack, check_restored
from rollover.staleness import rolled_back, staleness
from rollover.track.lifetimes import Lifetimes
from rollover.track.trace import Trace
from rollover.types import DropReason, Group, Media, Prompt, Rollout, RolloutState, StopReason
from unit.rollout.test_properties import ADVERSARIES, FILTER_RATE, MAX_RUNNING, PUBLISH_EVERY, configs, sequences
from unit.rollout.world import MIN_VALID, World, make_segment, make_task, same_rollout, through_json


class Killed(BaseException):
    pass


class Memory:
    """As much of a journal as the writer asks for."""

    writes = True

    def __init__(self) -> None:
        self.records: list[Record] = []

    def append(self, meta: Any, data: bytes = b"") -> None:
        self.records.append(Record(json.loads(json.dumps(meta)), data))

    def sync(self) -> None:
        pass


NOTHING: Any = SimpleNamespace(sync=lambda: None)


class Prompts:
    """The version that tasks are made for."""

    def __init__(self, version: int) -> None:
        self.version = version

    def on_step(self, version: int) -> None:
        self.version = version


def event_log(journal: Any, prompts: Any) -> EventLog:
    return EventLog(journal, RunClock(lambda: 1.5), prompts)


class JournaledWorld(World):
    """A random run with a journal, which is killed after `kill_after` checks."""

    def __init__(self, *args: Any, kill_after: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.left_until_kill = kill_after
        self.journal = Memory()
        self.writer = event_log(self.journal, self)
        self.lifecycle.listeners = [self.on_event]
        self.taken: dict[int, Group] = {}

    def on_event(self, event: Event) -> None:
        self.writer.on_event(event)
        if event.kind is EventKind.CONSUME:
            self.taken[event.group.group_id] = event.group
        elif event.kind is EventKind.GIVE_BACK:
            del self.taken[event.group.group_id]

    def check(self) -> None:
        super().check()
        self.left_until_kill -= 1
        if self.left_until_kill < 0:
            raise Killed

    def trained(self) -> None:
        self.writer.on_step(self.version)
        self.taken.clear()

    def step(self) -> list[Group]:
        consumed = super().step()
        self.writer.on_row(self.version, NOTHING, 0)
        return consumed

    def run_until_killed(self) -> None:
        try:
            while True:
                self.step()
        except Killed:
            pass


class Parts:
    """Of a run that goes on from `state` (None: from its start), with the tasks from `next_task` on."""

    def __init__(self, world: World, state: Any, version: int, next_task: int) -> None:
        self.lifecycle = Lifecycle(world.config, world.max_running, MIN_VALID)
        if state is not None:
            meta, arrays = state
            self.lifecycle.load_state_dict(through_json(meta), arrays)
        self.trace, self.lifetimes = Trace(self.lifecycle.clock), Lifetimes()
        self.lifecycle.clock.on_version(version)
        self.lifetimes.load_state_dict({}, self.lifecycle.cache.groups.values(), version, 0.0)
        self.lifecycle.listeners = [self.lifetimes.on_event, self.trace.on_event]
        self.trainer = SimpleNamespace(policy_version=version)
        self.prompts = Prompts(version)
        self.num_tasks = next_task

    def next_task(self, attempt: int) -> Any:
        self.num_tasks += 1
        return make_task(self.num_tasks - 1), Prompt((1, 2, 3))

    def train(self, groups: list[Group], version: int) -> None:
        assert groups and version == self.trainer.policy_version
        self.trainer.policy_version += 1


KILLS = st.integers(0, 120)
WORLDS = st.tuples(
    configs(), st.integers(), ADVERSARIES, MAX_RUNNING, st.sampled_from([0.0, 0.3]), FILTER_RATE, PUBLISH_EVERY, KILLS,
    st.integers(0, 3),
)  # fmt: skip


def journaled(
    config: RolloutConfig, seed: int, adversary: str, max_running: int | None, failures: float, filters: float,
    publish_every: int, kill_after: int, checkpoint_at: int,
) -> tuple[JournaledWorld, Parts, int]:  # fmt: skip
    """(a run that was killed, the parts of a checkpoint in it, the checkpoint's version)."""
    world = JournaledWorld(
        config, random.Random(seed), adversary, max_running, failures, filter_rate=filters, kill_after=10**9,
        publish_every=min(publish_every, config.max_staleness + 1),
    )  # fmt: skip
    state = None
    for _ in range(checkpoint_at):
        world.step()
        state = world.lifecycle.state_dict()
    parts = Parts(world, state, world.version, world.next_task)
    world.journal.records.clear()  # it begins at the checkpoint
    version = world.version
    world.left_until_kill = kill_after
    world.run_until_killed()
    return world, parts, version


@sequences(300)
@given(WORLDS)
def test_a_killed_run_is_the_same_again(of: Any) -> None:
    world, parts, _ = journaled(*of)
    replay = Replay(parts, parts.next_task, parts.train, lambda: None)  # pyright: ignore[reportArgumentType]
    replay.read(world.journal.records)
    replay.end()
    dead, again = world.lifecycle, parts.lifecycle
    dead.give_back(list(world.taken.values()), parts.trainer.policy_version)
    for rollout in dead.cache.running():
        dead.park(rollout)
    if replay.row_pending:  # killed between a step and its row
        dead.scheduler.on_new_version()
        again.scheduler.on_new_version()
    again.check()
    (meta, arrays), (dead_meta, dead_arrays) = again.state_dict(), dead.state_dict()
    dead_meta["stream_ended"] = meta["stream_ended"]
    assert through_json(meta) == through_json(dead_meta) | {
        "cache": _without_starts(meta["cache"], through_json(dead_meta["cache"]))
    }
    assert all((arrays[name] == dead_arrays[name]).all() for name in arrays)
    assert parts.num_tasks == world.next_task


def _without_starts(ours: Any, theirs: Any) -> Any:
    """The world's segments do not say where they start; those from the journal do."""
    for group, other in zip(ours["groups"], theirs["groups"], strict=True):
        for rollout, same in zip(group["rollouts"], other["rollouts"], strict=True):
            for segment, twin in zip(rollout["segments"], same["segments"], strict=True):
                twin["start"] = segment["start"]
    return theirs


class Continued(World):
    """A world that goes on with what a roll-back left."""

    def __init__(self, dead: World, parts: Parts, seed: int) -> None:
        super().__init__(dead.config, random.Random(seed), dead.adversary, dead.max_running, dead.failure_rate)
        self.publish_every = dead.publish_every
        self.lifecycle = parts.lifecycle
        self.lifecycle.listeners = []
        self.version = self.engine_version = parts.trainer.policy_version
        self.next_task = parts.num_tasks
        self.lengths = dead.lengths
        self.generated = self.lifecycle.ledger.generated_tokens
        self.num_left = self.lifecycle.cache.num_admitted - len(self.cache.groups)
        self.left = {}
        for group in self.cache.groups.values():
            for rollout in group.rollouts:
                self.admitted_version[group.group_id] = self.version
                self.seen[rollout.rollout_id] = self._tokens(rollout)
        self.lifecycle.on_new_version(self.version)
        self.lifecycle.scheduler.begin_step(self.version, self.version)
        for rollout in self.lifecycle.cache.unscored():
            if self.singly or is_complete(self.cache.groups[rollout.group_id]):
                self._score([rollout])

    def check(self) -> None:
        """The ledger balances. (There may be more groups than are admitted otherwise.)"""
        self.ledger.check(self.cache)
        assert len(self.left) + self.num_left + len(self.cache.groups) == self.cache.num_admitted


@sequences(300)
@given(WORLDS)
def test_after_a_roll_back_every_trained_token_is_in_bound(of: Any) -> None:
    """World.step asserts it of every group that it trains, and that finish_first drops nothing."""
    world, parts, version = journaled(*of)
    replay = RollBack(parts, parts.next_task, lambda *_: None, lambda: None)
    replay.read(world.journal.records)
    replay.end()
    bound = world.config.staleness_bound(world.publish_every)
    held = set(parts.lifecycle.cache.groups)
    num = replay.drop_stale(bound, compares_versions=False)
    ledger = parts.lifecycle.ledger
    assert ledger.dropped[DropReason.ROLLED_BACK].groups == num == len(held) - len(parts.lifecycle.cache.groups)
    parts.lifecycle.check()
    assert ledger.generated_tokens == world.ledger.generated_tokens, "what was sampled is counted, and once"
    assert parts.trainer.policy_version == version
    for group in parts.lifecycle.cache.groups.values():
        assert all(v <= version for r in group.rollouts for v in r.versions)
    check_restored(parts.lifecycle, version, 10**6)
    continued = Continued(world, parts, of[1])
    for _ in range(4):
        continued.step()


def test_lost_version_keeps_its_distance_after_roll_back() -> None:
    """Its staleness is the updates back to the checkpoint, and from there to the trainer's version."""
    for checkpoint in (0, 3, 10):
        for version in range(checkpoint + 5):
            label = rolled_back(version, checkpoint)
            for trainer in range(checkpoint, checkpoint + 5):
                away = max(0, version - checkpoint) + trainer - min(version, checkpoint)
                assert staleness(label, trainer) == away


def test_groups_of_lost_versions_are_dropped_where_the_loss_compares_them() -> None:
    """With proximal = "snapshot", or a segment correction, a version must name one policy."""
    config = RolloutConfig(
        groups_per_step=2, group_size=2, in_flight_groups=6, max_staleness=2, interrupt="when_enough"
    )
    of = (config, 5, "random", None, 0.0, 0.0, 1, 18, 1)
    kept = {}
    for compares_versions in (False, True):
        world, parts, version = journaled(*of)
        replay = RollBack(parts, parts.next_task, lambda *_: None, lambda: None)
        replay.read(world.journal.records)
        replay.end()
        assert replay.num_steps > 0 and replay.of_lost_versions
        replay.drop_stale(2, compares_versions=compares_versions)
        kept[compares_versions] = set(parts.lifecycle.cache.groups)
    assert kept[True] < kept[False] and not kept[True] & replay.of_lost_versions


def running(world_tokens: int = 3) -> tuple[Lifecycle, EventLog, Memory, Any]:
    """(a lifecycle with one running rollout that has `world_tokens` of an earlier run, its writer, ...)."""
    config = RolloutConfig(group_size=1, groups_per_step=1, max_new_tokens=20)
    lifecycle, journal = Lifecycle(config, None, MIN_VALID), Memory()
    writer = event_log(journal, Prompts(0))
    lifecycle.listeners = [writer.on_event]
    lifecycle.admit(make_task(0), Prompt((1, 2, 3)), 0)
    (rollout,) = lifecycle.start(0)
    lifecycle.append(rollout, [make_segment(world_tokens, 0)])
    lifecycle.start(0)
    return lifecycle, writer, journal, rollout


def read_back(journal: Memory, num_records: int | None = None, rollout_id: str = "0-0") -> Any:
    """The one rollout, or another, after the first `num_records`."""
    world = SimpleNamespace(config=RolloutConfig(group_size=1, groups_per_step=1, max_new_tokens=20), max_running=None)
    parts = Parts(world, None, 0, 0)  # pyright: ignore[reportArgumentType]
    replay = Replay(parts, parts.next_task, parts.train, lambda: None)  # pyright: ignore[reportArgumentType]
    replay.read(journal.records[:num_records])
    replay.end()
    return parts.lifecycle.cache.rollout(rollout_id)


def test_running_tokens_are_written_once_and_joined() -> None:
    lifecycle, writer, journal, rollout = running()
    first, second = make_segment(4, 0, first=3), make_segment(2, 1, first=7)
    for tokens in (make_segment(2, 0, first=3), first, first):
        writer.progress({i: [tokens] for i in writer.running})
    writer.progress({i: [first, second] for i in writer.running})
    told = [r.meta["segments"] for r in journal.records if r.meta["kind"] == "tokens"]
    assert [[s["num_tokens"] for s in of] for of in told] == [[2], [2], [2]]
    killed = read_back(journal)
    assert killed.state is RolloutState.PARKED and killed.num_tokens == 9
    lifecycle.append(rollout, [first, make_segment(5, 1, StopReason.EOS, first=7)])
    again = read_back(journal)
    assert same_rollout(again, rollout) and [len(s) for s in again.segments] == [3, 4, 5]


def test_tokens_of_a_failed_engine_are_replaced() -> None:
    lifecycle, writer, journal, rollout = running()
    writer.progress({i: [make_segment(4, 0, first=3)] for i in writer.running})
    writer.progress({i: [make_segment(2, 1, first=3)] for i in writer.running})  # again, under other weights
    assert read_back(journal).num_tokens == 7, "what it had is better than nothing, should the run be killed now"
    writer.progress({i: [make_segment(6, 1, first=3)] for i in writer.running})
    assert [s.policy_version for s in read_back(journal).segments] == [0, 1]
    lifecycle.append(rollout, [make_segment(8, 1, StopReason.EOS, first=3)])
    assert same_rollout(read_back(journal), rollout)


def test_refused_answer_keeps_earlier_tokens() -> None:
    lifecycle, writer, journal, rollout = running()
    writer.progress({i: [make_segment(4, 0, first=3)] for i in writer.running})
    lifecycle.park(rollout)
    assert same_rollout(read_back(journal), rollout) and rollout.num_tokens == 3


def test_full_rollout_keeps_room_to_stop() -> None:
    _, writer, journal, _ = running()
    writer.progress({i: [make_segment(17, 0, first=3)] for i in writer.running})
    assert read_back(journal).num_tokens == 19


def test_a_rollout_that_a_call_opened_comes_back_with_its_media() -> None:
    lifecycle, _, journal, rollout = running()
    picture = Media("a.png", "ab" * 32, (8, 8), 1, 2)
    prompt = Prompt((4, 5, 5), (picture,))
    lifecycle.open(Rollout(0, 0, rollout.task, prompt=prompt, trajectory=1))
    lifecycle.park(rollout)
    assert read_back(journal, rollout_id="0-0.1.0").prompt == prompt


def events(*, writes: int, error: bool = False) -> list[str]:
    """What happens, in order, if the first write returns only after the beat that did not wait for it."""
    seen: list[str] = []

    async def run() -> None:
        beaten, enough = asyncio.Event(), asyncio.Event()

        async def write() -> None:
            seen.append("write")
            if seen.count("write") == writes:
                enough.set()
            if not beaten.is_set():
                await beaten.wait()
                if error:
                    raise OSError("the disk")
            seen.append("written")

        def beat() -> None:
            seen.append("beat")
            beaten.set()

        timer = Timer(0.05, write, beat)
        timer.start()
        try:
            while not enough.is_set():
                await asyncio.sleep(0.001)
                timer.check()
        finally:
            timer.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    return seen


def test_a_late_write_is_not_followed_by_an_idle_interval() -> None:
    assert events(writes=2)[:4] == ["write", "beat", "written", "write"]


def test_a_late_write_ends_the_timer_with_its_error() -> None:
    with pytest.raises(OSError, match="the disk"):
        events(writes=2, error=True)
