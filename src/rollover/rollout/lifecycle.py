"""State machine of held rollouts: each transition updates cache, scheduler and ledger, and emits an event.

    admit -> start -> append (parks or finishes) -> set_rewards (READY, or dropped) -> consume | drop
                        └ a turn ended: ACTING -> append (parks or finishes)

    Rollouts of an Episode:
    WAITING ── begin_acting ──▶ ACTING, the agent runs ── open ──▶ WAITING, with the prompt of a call
    not RUNNING ── restart_episode ──▶ DROPPED (restarted), replaced by a WAITING one
    not RUNNING ── rerun_agent ──▶ ACTING: the agent was lost and runs again ── truncate ──▶ tokens that it did not
    request again are dropped (restarted)

The driver runs it on an engine, the planner under a virtual clock, the tests at random. Pure: the clock is passed in;
no event loop, no torch. At the end: how an environment's answer becomes the next segment.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollover.config.rollout import RolloutConfig
from rollover.envs.protocol import written
from rollover.rollout.cache import RolloutCache
from rollover.rollout.ledger import Ledger
from rollover.rollout.scheduler import Scheduler
from rollover.types import DropReason, Group, Prompt, Reward, Rollout, RolloutState, Segment, StopReason, Task

# Needed at every transition; Enum member lookups are slow.
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
    """A transition that just happened.

    `rollout`: for START, RESUME, PARK, ACT, ANSWER, FINISH, SCORE, and the Episode events BEGIN, OPEN, RESTART (the new
    rollout), AGAIN, CUT (DROPPED if it left). `kept`: (sibling, name, value) of KEEP. ACT: the turn ended and the
    environment runs. ANSWER: the environment has `written` and the rollout may continue; with FINISH `written` is its
    last text. `version`: the trainer version passed to ADMIT, START, RESUME, CONSUME and GIVE_BACK. DROP has `reason`,
    `filter` (name of the filter that matched) and `why` (what stalled or failed). `seconds`, `trainer_version`:
    RunClock.
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
    """The held groups and their transitions.

    `max_running`: rollouts that may run at once; None means no limit. A group with fewer than `min_valid_rewards`, as
    `num_valid` counts them, is dropped, and so is one for which `group_filter` returns (name of the filter, reason).
    `listeners` are called after each event, in order. `first_group_id`: see RolloutCache.

    `start`, `set_rewards`, `consume` and `on_new_version` make decisions, and apply them by `run`, `scored`, `take` and
    `drop`. Those decide nothing, so that run/resume.py can apply the events of a log.
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
        self.stream_ended = False  # no more tasks

    def admit(self, task: Task, prompt: Prompt, version: int) -> Group:
        """Admit a task as a new group of WAITING rollouts."""
        group = self.cache.admit(task, prompt, self.config.group_size, self.config.greedy_baseline)
        self.scheduler.on_admit(group, version)
        self.ledger.on_admit(group)
        self.emit(EventKind.ADMIT, group, version=version)
        return group

    def start(self, version: int) -> list[Rollout]:
        """Assign the free slots. Returns the rollouts to extend now, in order."""
        started = self.scheduler.to_start(version)
        for rollout in started:
            self.run(rollout, version)
        return started

    def run(self, rollout: Rollout, version: int) -> None:
        """Assign a slot to a rollout, for the step at trainer `version`."""
        resumed = rollout.state is _PARKED
        self.cache.start(rollout.rollout_id)
        self.scheduler.on_start(rollout, version)
        if resumed:
            self.ledger.resumed_rollouts += 1
        group = self.cache.groups[rollout.group_id]
        self.emit(EventKind.RESUME if resumed else EventKind.START, group, rollout, version=version)

    def append(self, rollout: Rollout, segments: Sequence[Segment], *, acts: bool = False) -> Group | None:
        """Append the engine's segments to a running rollout, or the environment's to an acting one; park or finish it.

        `acts`: unless the rollout is parked, only its turn has ended, and its environment runs next. An environment
        that writes nothing finishes the rollout with the stop reason of that turn. Returns the group if it is complete
        now and must be scored.
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
        """Park a running rollout with its tokens, or an acting one that continues after `written`."""
        kind = EventKind.ANSWER if rollout.state is _ACTING else EventKind.PARK
        self.cache.park(rollout.rollout_id)
        self.scheduler.on_park(rollout)
        self.emit(kind, self.cache.groups[rollout.group_id], rollout, written=written)

    def set_rewards(
        self, group: Group, rewards: Sequence[Reward], rollouts: Sequence[Rollout] | None = None
    ) -> bool | DropReason:
        """Set the rewards of these rollouts of the group (None: all).

        Returns True if the group is READY now, and False while siblings lack rewards. Returns the reason if the group
        is dropped: too few valid rewards, all tokens beyond the staleness bound, or a filter that matches. If a filter
        raises, the rewards are undone: a restarted run scores and filters again.
        """
        rollouts = group.rollouts if rollouts is None else rollouts
        assert len(rewards) == len(rollouts), f"{len(rewards)} rewards for {len(rollouts)} rollouts"
        for rollout, reward in zip(rollouts, rewards, strict=True):
            self.cache.set_reward(rollout.rollout_id, reward)
        try:
            drop = self._drop_reason(group) if group.ready else None
        except BaseException:
            for rollout in rollouts:
                self.cache.undo_reward(rollout.rollout_id)
            raise
        self.scored(group, rollouts)
        if not group.ready:
            return False
        if drop is None:
            self.emit(EventKind.READY, group)
            return True
        self.drop(group.group_id, *drop)
        return drop[0]

    def scored(self, group: Group, rollouts: Sequence[Rollout]) -> None:
        """Report that these rollouts of the group have their rewards."""
        for rollout in rollouts:
            self.emit(EventKind.SCORE, group, rollout)
        if group.ready:
            self.scheduler.on_ready(group)

    def consume(self, version: int, stream_ended: bool = False) -> list[Group]:
        """Remove the groups of the step at trainer `version` for training. Returns them in group-id order."""
        group_ids = self.scheduler.to_consume(version, stream_ended)
        assert group_ids is not None, "not enough groups for a step"
        return [self.take(group_id, version) for group_id in sorted(group_ids)]

    def take(self, group_id: int, version: int) -> Group:
        """Remove a READY group for the step at trainer `version`."""
        group = self.cache.consume(group_id)
        self.ledger.on_consume(group, self.config.oldest_in_loss(version))
        self.scheduler.on_leave(group)
        self.emit(EventKind.CONSUME, group, version=version)
        return group

    def give_back(self, groups: Sequence[Group], version: int) -> None:
        """Undo `consume(version)` after a step that was not trained: the groups are held and READY again."""
        oldest = self.config.oldest_in_loss(version)
        for group in groups:
            self.cache.give_back(group)
            self.ledger.on_consume(group, oldest, times=-1)
            self.scheduler.requeue(group, version)
            self.emit(EventKind.GIVE_BACK, group, version=version)

    def drop(self, group_id: int, reason: DropReason, filter: str = "", why: str = "") -> Group:
        """Drop the whole group. `filter`: name of the filter that matched; `why`: what stalled or failed."""
        group = self.cache.drop(group_id, reason)
        self.ledger.on_drop(group, reason)
        if reason is DropReason.FILTERED:
            self.ledger.filtered[filter] += 1
        self.scheduler.on_leave(group)
        self.emit(EventKind.DROP, group, reason=reason, filter=filter, why=why)
        return group

    def on_new_version(self, version: int) -> list[Group]:
        """Drop groups beyond the staleness bound, now that the trainer is at `version`. Returns them."""
        dropped = [self.drop(group_id, DropReason.STALE) for group_id in self.scheduler.to_drop(version)]
        self.scheduler.on_new_version()
        return dropped

    # Rollouts of an Episode: they join and leave while their group is held

    def begin_acting(self, rollout: Rollout) -> None:
        """Start the agent of an Episode: its WAITING first rollout takes no slot until the agent's first call."""
        self.cache.begin_acting(rollout.rollout_id)
        self.scheduler.on_park(rollout)
        self.emit(EventKind.BEGIN, self.cache.groups[rollout.group_id], rollout)

    def open(self, rollout: Rollout) -> Rollout:
        """Add `rollout`, opened by a call, to its held group. Returns the held one, which may start.

        If the group has a rollout of this id, without tokens, that one gets the prompt and the role.
        """
        group = self.cache.groups[rollout.group_id]
        held = self.cache.open(rollout)
        if held is rollout:
            self.ledger.admitted_rollouts += 1
        self.scheduler.on_open(held, joins=held is rollout)
        self.emit(EventKind.OPEN, group, held)
        return held

    def restart_episode(self, group: Group, sibling: int) -> Rollout:
        """Replace all rollouts of the Episode, none of which runs, by one without tokens. Returns the new one."""
        leaving = [r for r in group.rollouts if r.sibling == sibling]
        first = Rollout(group.group_id, sibling, group.task, greedy=leaving[0].greedy, prompt=group.prompt)
        unfinished = sum(r.state not in _FINISHED for r in leaving)
        self.cache.replace(leaving, first)
        self.ledger.admitted_rollouts += 1
        self.ledger.on_leave(leaving, DropReason.RESTARTED)
        self.scheduler.on_restart(leaving, unfinished, first)
        self.emit(EventKind.RESTART, group, first, reason=DropReason.RESTARTED)
        return first

    def rerun_agent(self, rollout: Rollout) -> None:
        """Set a rollout, which does not run, to ACTING: its agent was lost, and a new one repeats its turns."""
        if rollout.state is RolloutState.ACTING:
            return
        finished = rollout.state in _FINISHED
        self.cache.rerun_agent(rollout.rollout_id)
        self.scheduler.on_rerun_agent(rollout, finished=finished)
        self.emit(EventKind.AGAIN, self.cache.groups[rollout.group_id], rollout)

    def truncate(self, rollout: Rollout, num_tokens: int) -> Rollout:
        """Drop the tokens after the first `num_tokens` of an ACTING rollout (restarted): its new agent diverged there.

        The whole rollout leaves if `num_tokens` is 0 and its Episode has others. Returns the shorter rollout, or the
        one that left.
        """
        left = self.cache.truncate(rollout.rollout_id, num_tokens)
        if left.state is RolloutState.DROPPED:
            self.ledger.on_leave([left], DropReason.RESTARTED)
            self.scheduler.on_rollout_left(left)
        else:
            restarted = self.ledger.dropped[DropReason.RESTARTED]
            restarted.tokens += rollout.num_sampled_tokens - left.num_sampled_tokens
        self.emit(EventKind.CUT, self.cache.groups[rollout.group_id], left, reason=DropReason.RESTARTED)
        return left

    def keep(self, group_id: int, sibling: int, name: str, value: Any) -> None:
        """Store a JSON value of an Episode under a name; it survives kills while the group is held."""
        if group_id not in self.cache.groups:
            return
        self.cache.keep(group_id, sibling, name, value)
        self.emit(EventKind.KEEP, self.cache.groups[group_id], kept=(sibling, name, value))

    # State

    def check(self) -> None:
        """Raise AssertionError unless every task and token is in exactly one account."""
        self.ledger.check(self.cache)

    def metrics(self) -> dict[str, float]:
        """Return the ledger's accounts, and how many groups the scheduler holds at once."""
        return {
            **self.ledger.metrics(self.cache),
            "groups/in_flight_limit": self.scheduler.in_flight_groups,
            "length/longest_of_group": self.scheduler.lengths.longest,
        }

    def state_dict(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return (JSON-able meta, arrays) of cache, scheduler and ledger."""
        meta, arrays = self.cache.state_dict()
        state = {"cache": meta, "scheduler": self.scheduler.state_dict(), "ledger": self.ledger.state_dict()}
        return state | {"stream_ended": self.stream_ended}, arrays

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Replace the contents by a saved state. Raises ValueError as RolloutCache.load_state_dict."""
        self.cache.load_state_dict(state["cache"], arrays)
        self.scheduler.load_state_dict(state["scheduler"], self.cache.groups.values())
        self.ledger.load_state_dict(state["ledger"])
        self.stream_ended = state.get("stream_ended", False)  # absent in a checkpoint of an earlier version

    def emit(self, kind: EventKind, group: Group, rollout: Rollout | None = None, **more: Any) -> None:
        """Send an event to the listeners. `more`: further fields of the Event."""
        if self.listeners:
            clock = self.clock
            event = Event(kind, group, rollout, seconds=clock.seconds(), trainer_version=clock.version, **more)
            for listener in self.listeners:
                listener(event)

    # Private

    def _drop_reason(self, group: Group) -> tuple[DropReason, str] | None:
        """Return the reason to drop a scored group, and the filter's name; None to train it."""
        if self.num_valid(group) < self.min_valid_rewards:
            return DropReason.TOO_FEW_REWARDS, ""
        # A group that is READY only after a weight sync may have tokens of earlier weights alone.
        if self.config.expiry(group) < self.scheduler.next_version:
            assert not self.config.finish_first, f"group {group.group_id} is READY beyond the staleness bound"
            return DropReason.STALE, ""
        match = self.group_filter(group) if self.group_filter is not None else None
        return None if match is None else (DropReason.FILTERED, match[0])


def num_valid_rewards(group: Group) -> int:
    """Return how many rollouts of the group have a score."""
    return sum(r.reward is not None and not r.reward.missing for r in group.rollouts)


def is_complete(group: Group) -> bool:
    """Whether every rollout of the group is finished."""
    return all(r.state in _FINISHED for r in group.rollouts)


def environment_is_next(rollout: Rollout, segments: Sequence[Segment], max_new_tokens: int) -> bool:
    """Return whether the environment has the next turn after `segments` of an `extend`.

    It has none after an interruption, after the rollout's last token of budget, or before its first token.
    """
    num_tokens = rollout.num_tokens + sum(map(len, segments))
    return segments[-1].stop_reason is not StopReason.PAUSED and 0 < num_tokens < max_new_tokens


def segments_to_append(rollout: Rollout, answer: Segment | None, max_new_tokens: int) -> list[Segment]:
    """Return the segments to append for an environment's `answer`; none if it is done."""
    if answer is None:
        return []
    if len(answer) + (answer.stop_reason is StopReason.PAUSED) > max_new_tokens - rollout.num_tokens:
        return [end_segment(rollout, StopReason.LENGTH)]  # too long, or no budget left for the policy
    return [answer]


def end_segment(rollout: Rollout, reason: StopReason) -> Segment:
    """Return an empty environment segment that finishes the rollout for this reason."""
    return replace(written(rollout, ()), stop_reason=reason)


class RunClock:
    """Clock of a run: the time and trainer version of each event.

    It is paused while no process runs, and goes back to a resumed checkpoint, so that no second counts twice. `read`
    returns seconds since any origin. `version`: completed training steps, whether or not the engine has their weights.
    """

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self._read, self._origin = read, read()
        self._paused_at: float | None = None
        self.version = 0

    def seconds(self) -> float:
        """Return seconds since the start of the run."""
        return self._read() - self._origin if self._paused_at is None else self._paused_at

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    def pause_at(self, seconds: float) -> None:
        """Pause the clock at `seconds` until `resume`: replayed events happened then, in an earlier process."""
        self._paused_at = seconds

    def resume(self) -> None:
        """Continue from where the clock was paused."""
        self._origin, self._paused_at = self._read() - self.seconds(), None

    def on_version(self, version: int) -> None:
        """Date the next events at trainer `version`."""
        self.version = version

    def set(self, seconds: float, version: int) -> None:
        """Continue from the `seconds` and trainer `version` of a checkpoint, or from zeros."""
        self._origin, self.version, self._paused_at = self._read() - seconds, version, None
