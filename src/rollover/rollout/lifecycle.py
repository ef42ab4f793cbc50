"""Every transition that a held rollout makes, as one state machine: cache, scheduler and ledger told together.

    admit -> start -> append (parks or finishes) -> set_rewards (READY, or dropped) -> consume | drop
                        └ or its turn ended, and it acts -> append (parks or finishes)

    of an Episode:
    WAITING ── begin_acting ──▶ ACTING, its agent is at work ── open ──▶ WAITING, with a call's prompt
    any but RUNNING ── restart_episode ──▶ DROPPED (restarted), and a WAITING one comes in their place
    any but RUNNING ── act_again ──▶ ACTING: its agent was lost, and is at work again ── cut ──▶ what the agent did not
    ask for again leaves (restarted)

The driver carries this out on an engine, the planner under a virtual clock, the tests at random: the same rules for
all. Pure: no clock of its own, no event loop, no torch. Owns nothing but its three owners, and who is told of events.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollover.config.rollout import RolloutConfig
from rollover.rollout.cache import RolloutCache
from rollover.rollout.ledger import Ledger
from rollover.rollout.run_clock import RunClock
from rollover.rollout.scheduler import Scheduler
from rollover.staleness import expired
from rollover.types import DropReason, Group, Prompt, Reward, Rollout, RolloutState, Segment, StopReason, Task

# Asked at every transition, and a member of an Enum class is slow to look up.
_PARKED, _ACTING, _PAUSED = RolloutState.PARKED, RolloutState.ACTING, StopReason.PAUSED
_FINISHED = (RolloutState.SCORING, RolloutState.READY)


class EventKind(enum.Enum):
    ADMIT = "admit"
    BEGIN = "begin"
    OPEN = "open"
    RESTART = "restart"
    AGAIN = "again"
    CUT = "cut"
    KEEP = "keep"
    START = "start"
    RESUME = "resume"
    PARK = "park"
    ACT = "act"
    ANSWER = "answer"
    FINISH = "finish"
    SCORE = "score"
    READY = "ready"
    CONSUME = "consume"
    GIVE_BACK = "give_back"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that just happened: `rollout` for START, RESUME, PARK, ACT, ANSWER, FINISH, SCORE; `reason` for DROP.

    BEGIN, OPEN, RESTART, AGAIN, CUT, KEEP: of Episodes; `rollout` of RESTART is the new one, that of
    CUT is DROPPED where it left; `kept`: (sibling, name, value) of KEEP. ACT: its turn ended, and
    its environment is at work. ANSWER: that has `written`, and the rollout may go on; with FINISH it is the last that
    it wrote. `version`: the trainer's that ADMIT, START, RESUME, CONSUME and GIVE_BACK were
    told; `filter`: the name of the one that matched, for DROP; `why`: what stalled or failed, for DROP, in words.
    `seconds`, `trainer_version`: of the run's clock (run_clock.py) at that moment.
    """

    kind: EventKind
    group: Group
    rollout: Rollout | None = None
    reason: DropReason | None = None
    version: int = 0
    filter: str = ""
    why: str = ""
    written: tuple[Segment, ...] = ()
    kept: tuple[int, str, Any] | None = None
    seconds: float = 0.0
    trainer_version: int = 0


class Lifecycle:
    """The held groups and what becomes of them.

    `max_running`: rollouts that may run at once; None means no limit. A group with fewer than `min_valid_rewards`, as
    `num_valid` counts them, is dropped, and so is one for which `group_filter` answers (the filter's name, what is the
    matter). `listeners` are called after each event, in their order; `clock` says when it was. `first_group_id`: see
    RolloutCache.

    `start`, `set_rewards`, `consume` and `on_new_version` decide, and carry out what they decided by the others: `run`,
    `score`, `take`, `drop`. Those decide nothing: what a journal tells can so happen again (run/resume.py).
    """

    def __init__(
        self,
        config: RolloutConfig,
        max_running: int | None = None,
        min_valid_rewards: int = 2,
        listeners: Iterable[Callable[[Event], None]] = (),
        group_filter: Callable[[Group], tuple[str, str] | None] | None = None,
        num_valid: Callable[[Group], int] | None = None,
        first_group_id: int = 0,
        clock: RunClock | None = None,
    ) -> None:
        self.config = config
        self.min_valid_rewards, self.num_valid = min_valid_rewards, num_valid or num_valid_rewards
        self.group_filter = group_filter
        self.listeners, self.clock = list(listeners), clock or RunClock(lambda: 0.0)
        self.cache = RolloutCache(config.max_new_tokens, first_group_id)
        self.scheduler = Scheduler(config, max_running)
        self.ledger = Ledger()
        self.stream_ended = False  # there are no more tasks

    def admit(self, task: Task, prompt: Prompt, version: int) -> Group:
        """A new task becomes a group of WAITING rollouts."""
        group = self.cache.admit(task, prompt, self.config.group_size, self.config.greedy_baseline)
        self.scheduler.on_admit(group, version)
        self.ledger.on_admit(group)
        self.emit(EventKind.ADMIT, group, version=version)
        return group

    def start(self, version: int) -> list[Rollout]:
        """Give the free slots away. Returns the rollouts that must be extended now, in order."""
        started = self.scheduler.to_start(version)
        for rollout in started:
            self.run(rollout, version)
        return started

    def run(self, rollout: Rollout, version: int) -> None:
        """A rollout gets a slot, for the step at trainer `version`."""
        resumed = rollout.state is _PARKED
        self.cache.start(rollout.rollout_id)
        self.scheduler.on_start(rollout, version)
        if resumed:
            self.ledger.resumed_rollouts += 1
        group = self.cache.groups[rollout.group_id]
        self.emit(EventKind.RESUME if resumed else EventKind.START, group, rollout, version=version)

    def append(self, rollout: Rollout, segments: Sequence[Segment], *, acts: bool = False) -> Group | None:
        """What a running rollout's extension returned, or what the environment of an acting one wrote: it is parked, or
        its generation is finished.

        `acts`: unless it is parked its turn alone has ended, and its environment is at work. Where that writes nothing
        the rollout is finished for the reason for which its turn ended. Returns its group if that is complete now, and
        must be scored.
        """
        acted = rollout.state is _ACTING
        assert segments or acted, f"extend of {rollout.rollout_id} returned no segment"
        self.cache.append(rollout.rollout_id, segments)
        self.ledger.on_append(segments)
        self.scheduler.on_tokens(rollout, rollout.min_version)
        stop_reason = segments[-1].stop_reason if segments else rollout.stop_reason
        written = tuple(segments) if acted else ()
        if stop_reason is _PAUSED:
            self.park(rollout, written)
            return None
        assert stop_reason is not None
        self.cache.finish(rollout.rollout_id, stop_reason, acts=acts)
        group = self.cache.groups[rollout.group_id]
        if acts:
            self.scheduler.on_park(rollout)
            self.emit(EventKind.ACT, group, rollout)
            return None
        complete = self.scheduler.on_finish(rollout)
        self.emit(EventKind.FINISH, group, rollout, written=written)
        return group if complete else None

    def park(self, rollout: Rollout, written: tuple[Segment, ...] = ()) -> None:
        """A running rollout leaves its slot with what it has; or an acting one may go on after what was `written`."""
        kind = EventKind.ANSWER if rollout.state is _ACTING else EventKind.PARK
        self.cache.park(rollout.rollout_id)
        self.scheduler.on_park(rollout)
        self.emit(kind, self.cache.groups[rollout.group_id], rollout, written=written)

    def set_rewards(
        self, group: Group, rewards: Sequence[Reward], rollouts: Sequence[Rollout] | None = None
    ) -> bool | DropReason:
        """Rewards of these rollouts of the group (None: of all). With the last of them the group is READY: True.

        Or it is dropped, and the answer is why: too few of its rewards are valid, none of its tokens can be trained in
        bound any more, or a filter matches. False: siblings have none yet. Where a filter fails, the rewards are as if
        they had not come: a restarted run asks for them, and the filter, again.
        """
        rollouts = group.rollouts if rollouts is None else rollouts
        assert len(rewards) == len(rollouts), f"{len(rewards)} rewards for {len(rollouts)} rollouts"
        for rollout, reward in zip(rollouts, rewards, strict=True):
            self.cache.set_reward(rollout.rollout_id, reward)
        try:
            why = self._why_dropped(group) if group.ready else None
        except BaseException:
            for rollout in rollouts:
                self.cache.take_reward_back(rollout.rollout_id)
            raise
        self.scored(group, rollouts)
        if not group.ready:
            return False
        if why is None:
            self.emit(EventKind.READY, group)
            return True
        self.drop(group.group_id, *why)
        return why[0]

    def scored(self, group: Group, rollouts: Sequence[Rollout]) -> None:
        """These rollouts of the group have got their rewards."""
        for rollout in rollouts:
            self.emit(EventKind.SCORE, group, rollout)
        if group.ready:
            self.scheduler.on_ready(group)

    def consume(self, version: int, stream_ended: bool = False) -> list[Group]:
        """The groups of the step at trainer `version` leave for training, in group-id order."""
        group_ids = self.scheduler.to_consume(version, stream_ended)
        assert group_ids is not None, "there is not enough for a step"
        return [self.take(group_id, version) for group_id in sorted(group_ids)]

    def take(self, group_id: int, version: int) -> Group:
        """A READY group leaves for the step at trainer `version`."""
        group = self.cache.consume(group_id)
        self.ledger.on_consume(group, self.config.oldest_in_loss(version))
        self.scheduler.on_leave(group)
        self.emit(EventKind.CONSUME, group, version=version)
        return group

    def give_back(self, groups: Sequence[Group], version: int) -> None:
        """Undo `consume(version)`: their step was not trained. They are held and READY again."""
        oldest = self.config.oldest_in_loss(version)
        for group in groups:
            self.cache.give_back(group)
            self.ledger.on_consume(group, oldest, times=-1)
            self.scheduler.hold_again(group, version)
            self.emit(EventKind.GIVE_BACK, group, version=version)

    def drop(self, group_id: int, reason: DropReason, filter: str = "", why: str = "") -> Group:
        """The whole group leaves untrained. `filter`: the name of the one that matched it; `why`: in words."""
        group = self.cache.drop(group_id, reason)
        self.ledger.on_drop(group, reason)
        if reason is DropReason.FILTERED:
            self.ledger.filtered[filter] += 1
        self.scheduler.on_leave(group)
        self.emit(EventKind.DROP, group, reason=reason, filter=filter, why=why)
        return group

    def on_new_version(self, version: int) -> list[Group]:
        """The trainer is at `version`, live in the engine or not: drops what can no longer be trained in bound."""
        dropped = [self.drop(group_id, DropReason.STALE) for group_id in self.scheduler.to_drop(version)]
        self.scheduler.on_new_version()
        return dropped

    # Rollouts of an Episode, which come and go while their group is held

    def begin_acting(self, rollout: Rollout) -> None:
        """The first rollout of an Episode, WAITING without a token: its agent is at work, and it takes no slot until a
        call comes."""
        self.cache.begin_acting(rollout.rollout_id)
        self.scheduler.on_park(rollout)
        self.emit(EventKind.BEGIN, self.cache.groups[rollout.group_id], rollout)

    def open(self, rollout: Rollout) -> Rollout:
        """A call opens `rollout` in its held group. Where the group has one of this id, without a token, that one gets
        the prompt and the role. Returns the one that is held, which may start."""
        group = self.cache.groups[rollout.group_id]
        held = self.cache.open(rollout)
        if held is rollout:
            self.ledger.admitted_rollouts += 1
        self.scheduler.on_open(held, joins=held is rollout)
        self.emit(EventKind.OPEN, group, held)
        return held

    def restart_episode(self, group: Group, sibling: int) -> Rollout:
        """All rollouts of the Episode leave, and one without a token comes. None of them runs. Returns the new one."""
        leaving = [r for r in group.rollouts if r.sibling == sibling]
        first = Rollout(group.group_id, sibling, group.task, greedy=leaving[0].greedy, prompt=group.prompt)
        unfinished = sum(r.state not in _FINISHED for r in leaving)
        self.cache.replace(leaving, first)
        self.ledger.admitted_rollouts += 1
        self.ledger.on_leave(leaving, DropReason.RESTARTED)
        self.scheduler.on_restart(leaving, unfinished, first)
        self.emit(EventKind.RESTART, group, first, reason=DropReason.RESTARTED)
        return first

    def act_again(self, rollout: Rollout) -> None:
        """A rollout, which does not run, of an Episode whose agent was lost: another agent is at work, and continues it
        when it asks for that turn again."""
        if rollout.state is RolloutState.ACTING:
            return
        finished = rollout.state in _FINISHED
        self.cache.act_again(rollout.rollout_id)
        self.scheduler.on_act_again(rollout, finished=finished)
        self.emit(EventKind.AGAIN, self.cache.groups[rollout.group_id], rollout)

    def cut(self, rollout: Rollout, num_tokens: int) -> Rollout:
        """Drop the tokens after the first `num_tokens` of an ACTING rollout (restarted): its agent, at work again, did
        not ask for them. The whole rollout leaves where `num_tokens` is 0 and its Episode has others. Returns what is
        held in its place, or the one that left."""
        left = self.cache.cut(rollout.rollout_id, num_tokens)
        if left.state is RolloutState.DROPPED:
            self.ledger.on_leave([left], DropReason.RESTARTED)
            self.scheduler.on_rollout_left(left)
        else:
            restarted = self.ledger.dropped[DropReason.RESTARTED]
            restarted.tokens += rollout.num_sampled_tokens - left.num_sampled_tokens
        self.emit(EventKind.CUT, self.cache.groups[rollout.group_id], left, reason=DropReason.RESTARTED)
        return left

    def keep(self, group_id: int, sibling: int, name: str, value: Any) -> None:
        """Keep a JSON value of an Episode under a name, across kills, while its group is held."""
        if group_id not in self.cache.groups:
            return
        self.cache.keep(group_id, sibling, name, value)
        self.emit(EventKind.KEEP, self.cache.groups[group_id], kept=(sibling, name, value))

    # What is held

    def check(self) -> None:
        """AssertionError unless every task and token is in exactly one account."""
        self.ledger.check(self.cache)

    def metrics(self) -> dict[str, float]:
        """The ledger's accounts, and how many groups the scheduler holds at once."""
        return {
            **self.ledger.metrics(self.cache),
            "groups/in_flight_limit": self.scheduler.in_flight_groups,
            "length/longest_of_group": self.scheduler.lengths.longest,
        }

    def state_dict(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(JSON-able meta, arrays) of all three owners."""
        meta, arrays = self.cache.state_dict()
        state = {"cache": meta, "scheduler": self.scheduler.state_dict(), "ledger": self.ledger.state_dict()}
        return state | {"stream_ended": self.stream_ended}, arrays

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Replace the contents by a saved state. ValueError as RolloutCache.load_state_dict."""
        self.cache.load_state_dict(state["cache"], arrays)
        self.scheduler.load_state_dict(state["scheduler"], self.cache.groups.values())
        self.ledger.load_state_dict(state["ledger"])
        self.stream_ended = state.get("stream_ended", False)  # absent in a checkpoint of an earlier version

    def emit(self, kind: EventKind, group: Group, rollout: Rollout | None = None, **more: Any) -> None:
        """Report what happened to a group or a rollout. `more`: further fields of the Event."""
        if self.listeners:
            clock = self.clock
            event = Event(kind, group, rollout, seconds=clock.seconds(), trainer_version=clock.version, **more)
            for listener in self.listeners:
                listener(event)

    # Private

    def _why_dropped(self, group: Group) -> tuple[DropReason, str] | None:
        """Why a group that has its rewards is not trained, and the name of the filter; None: it is."""
        if self.num_valid(group) < self.min_valid_rewards:
            return DropReason.TOO_FEW_REWARDS, ""
        # What gets READY after new weights are live may have tokens of earlier ones alone.
        masks = self.config.masks
        if expired([group], self.scheduler.next_version, self.config.max_staleness, masks=masks):
            assert not self.config.finish_first, f"group {group.group_id} is READY beyond the staleness bound"
            return DropReason.STALE, ""
        match = self.group_filter(group) if self.group_filter is not None else None
        return None if match is None else (DropReason.FILTERED, match[0])


def acting_in(groups: Iterable[Group]) -> list[Rollout]:
    """Those whose environment is at work, or is to be asked again after a restart; in the order of their groups."""
    return [r for group in groups for r in group.rollouts if r.state is RolloutState.ACTING]


def num_valid_rewards(group: Group) -> int:
    """How many of its rollouts have a score."""
    return sum(r.reward is not None and not r.reward.missing for r in group.rollouts)


def is_complete(group: Group) -> bool:
    """Whether every rollout of the group is finished."""
    return all(r.state in _FINISHED for r in group.rollouts)
