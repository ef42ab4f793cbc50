"""The watchdog detects rollouts and scorings that make no progress, and decides what to do about each.

    rollout   no token for rollout_timeout_s ─▶ CONTINUE: interrupt it; the scheduler resumes it from its tokens
              the max_stalls-th time without a token in between ─▶ DROP: drop its group, interrupt its siblings
              interrupted, not back within grace_s ─▶ CANCEL: resume from the tokens that `progress` shows
              cancelled, not back within grace_s ─▶ ABANDON: remove it from all waits, drop its group
    scoring   past its limit ─▶ RESCORE: cancel it, score again;  once more ─▶ FAIL_SCORING: its rewards are missing

A pure state machine over calls of `on_*` with the time (`now`: seconds of any monotonic clock). Never waits, never
touches a rollout or a task: player.py executes its actions.

It handles single rollouts and scorings that hang. If all of them fail, the failure limit ends the run
(failure_limit.py); if the event loop is blocked, run/blocked_warning.py reports it.

These are not stalls: a rollout that waits in the engine's queue while others get tokens; a scoring that waits for an
older one (only the oldest can stall, and the next one's time begins when that has ended); time in which the event loop
was blocked.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollover.config import WatchdogConfig
from rollover.types import Segment, group_name

OFF = WatchdogConfig(rollout_timeout_s=0, reward_timeout_s=0)  # the other limits are not the watchdog's
_CHECKS_PER_LIMIT = 4
_SHORTEST_PAUSE_S = 1e-3


class Action(enum.Enum):
    """Action on a stall; the value completes its message."""

    CONTINUE = "it is interrupted and continued from there"
    CANCEL = "it does not come back, so it is cancelled and continued from there"
    CANCEL_DROPPED = "it does not come back, so it is cancelled; its group is being dropped"
    DROP = "it stalls once too often, so its group is dropped (stalled)"
    ABANDON = "its cancellation has no effect, so it is abandoned and its group is dropped (stalled)"
    RESCORE = "it is cancelled and scored again"
    FAIL_SCORING = "it is cancelled and its rewards are missing"


@dataclass(frozen=True, slots=True)
class Stall:
    """A rollout, or a scoring (of a whole group: `rollout_id` None), that makes no progress. Prints as one line.

    `state`: running, interrupted, cancelled or scoring. `age_s`: since its `extend` or scoring began. `num_tokens`: its
    known tokens; the last of them is `token_age_s` old as of the last checks.
    """

    action: Action
    group_id: int
    rollout_id: str | None
    state: str
    age_s: float
    num_tokens: int = 0
    token_age_s: float = 0.0

    @property
    def is_scoring(self) -> bool:
        return self.state == "scoring"

    @property
    def key(self) -> int | str:
        """Return the id of the rollout, or of the group that is scored together."""
        return self.group_id if self.rollout_id is None else self.rollout_id

    @property
    def what(self) -> str:
        """Return the name of the stalled rollout or scoring, its state, age and last token."""
        age = f"{self.state}, begun {_seconds(self.age_s)} ago"
        if self.is_scoring:
            if self.rollout_id is None:
                return f"the rewards of group {group_name(self.group_id)} ({age})"
            return f"the reward of rollout {self.rollout_id} ({age})"
        return f"rollout {self.rollout_id} ({age}, {self.num_tokens} tokens, none for {_seconds(self.token_age_s)})"

    def __str__(self) -> str:
        return f"watchdog: {self.what}: {self.action.value}"


@dataclass(slots=True)
class _Extend:
    """A rollout in the engine. `began_with` and `num_tokens` include the tokens of earlier segments."""

    group_id: int
    started: float
    began_with: int
    num_tokens: int
    last_token: float  # time of the check that first saw the last token; `started` before the first
    stalled: bool = False
    interrupted: float = math.inf
    cancelled: float = math.inf

    @property
    def state(self) -> str:
        if self.cancelled < math.inf:
            return "cancelled"
        return "interrupted" if self.interrupted < math.inf else "running"

    def stall(self, action: Action, rollout_id: str, now: float) -> Stall:
        age, token_age = now - self.started, now - self.last_token
        return Stall(action, self.group_id, rollout_id, self.state, age, self.num_tokens, token_age)


class _Scorings:
    """The scorings in flight, the oldest first. `limit_s`: time limit of the oldest; 0: none."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._begun: dict[int | str, tuple[int, float]] = {}
        """(group id, start) by group id, or by the id of a rollout scored alone."""
        self._oldest_since = 0.0
        """When the previous oldest one ended."""
        self._repeated: set[int | str] = set()
        """Keys of those that were scored again."""

    @property
    def keys(self) -> list[int | str]:
        return list(self._begun)

    def begin(self, key: int | str, group_id: int, now: float) -> None:
        """Add a scoring; a repeated one becomes the newest."""
        self._pop(key, now)
        self._begun[key] = group_id, now

    def end(self, key: int | str, now: float) -> None:
        self._pop(key, now)
        self._repeated.discard(key)

    def clear(self) -> None:
        self._begun.clear()
        self._repeated.clear()

    def check(self, in_flight: Collection[int | str] | None, now: float) -> list[Stall]:
        """Return the oldest scoring if it is in flight and late. None: scoring is blocked, and no time counts."""
        if in_flight is None:
            self._oldest_since = now
            return []
        oldest = next(iter(self._begun), None)
        if oldest is None or oldest not in in_flight or self.limit_s == 0:
            return []
        group_id, started = self._begun[oldest]
        if now - max(started, self._oldest_since) < self.limit_s:
            return []
        action = Action.FAIL_SCORING if oldest in self._repeated else Action.RESCORE
        self._repeated.add(oldest)
        return [Stall(action, group_id, oldest if isinstance(oldest, str) else None, "scoring", now - started)]

    def _pop(self, key: int | str, now: float) -> None:
        was_oldest = next(iter(self._begun), None) == key
        self._begun.pop(key, None)
        if was_oldest:
            self._oldest_since = now


class EvaluationStalled(Exception):
    """A stall in an evaluation, which could not be complete: it ends generation at once."""


class Watchdog:
    """Stall detector of the rollouts and scorings in flight.

    `scoring_s`: how long a group's scoring may take by its own limits. `patient`: return an action for each stall; if
    False, the first stall raises EvaluationStalled. `scoring_blocked`: returns whether no reward worker is available;
    no scoring's time counts then. `max_filtered_steps`: see FailureLimit.
    """

    def __init__(
        self,
        config: WatchdogConfig = OFF,
        scoring_s: float = 0.0,
        *,
        patient: bool = True,
        scoring_blocked: Callable[[], bool] = lambda: False,
        max_filtered_steps: int = 10,
    ) -> None:
        self.config, self.patient, self._scoring_blocked = config, patient, scoring_blocked
        self.max_filtered_steps = max_filtered_steps
        self._extends: dict[str, _Extend] = {}
        self._stalls: dict[str, int] = {}  # by rollout id: in a row, without a token in between
        self._scorings = _Scorings(config.reward_timeout_s and config.reward_timeout_s + scoring_s)
        self._dropping: set[int] = set()  # groups that are dropped as soon as none of their rollouts runs
        self._any_token = 0.0  # when a token of any rollout was last seen
        self._due = math.inf
        self._blocked_s = 0.0  # of the event loop; excluded from every timeout
        self._counts = dict.fromkeys(("stalled_rollouts", "stalled_rewards", "redispatched"), 0)

    @property
    def is_on(self) -> bool:
        return self.config.rollout_timeout_s > 0 or self.config.reward_timeout_s > 0

    @property
    def _interval(self) -> float:
        """Return the seconds between two checks, by which a stall is detected late at worst."""
        limits = [self.config.rollout_timeout_s] if self.config.rollout_timeout_s else []
        limits += [self._scorings.limit_s] if self._scorings.limit_s else []
        return min(limits) / _CHECKS_PER_LIMIT

    @property
    def scoring(self) -> list[int | str]:
        """Return the ids of the groups, and of the single rollouts, being scored, the oldest scoring first."""
        return self._scorings.keys

    # Transitions

    def on_start(self, rollout_id: str, group_id: int, num_tokens: int, now: float) -> None:
        """Watch an `extend` of a rollout that has `num_tokens` already."""
        now -= self._blocked_s
        self._extends[rollout_id] = _Extend(group_id, now, num_tokens, num_tokens, now)

    def on_interrupt(self, rollout_ids: Iterable[str], now: float) -> None:
        """Note that these rollouts were interrupted, for whatever reason."""
        for extend in filter(None, map(self._extends.get, rollout_ids)):
            extend.interrupted = min(extend.interrupted, now - self._blocked_s)

    def on_end(self, rollout_id: str, num_tokens: int, now: float) -> None:
        """Stop watching an `extend` that returned or was abandoned. The rollout has `num_tokens` now."""
        self._record_tokens(rollout_id, self._extends.pop(rollout_id), num_tokens, now - self._blocked_s)

    def on_scoring_start(self, group_id: int, now: float, key: int | str | None = None) -> None:
        """Watch a scoring; a repeated one becomes the newest.

        `key`: id of a rollout of the group that is scored alone; None or the group's id: the whole group.
        """
        self._scorings.begin(group_id if key is None else key, group_id, now - self._blocked_s)

    def on_scoring_end(self, key: int | str, now: float) -> None:
        self._scorings.end(key, now - self._blocked_s)

    def on_leave(self, rollout_ids: Iterable[str]) -> None:
        """Reset the stall counts of rollouts that left."""
        for rollout_id in rollout_ids:
            self._stalls.pop(rollout_id, None)

    def clear(self) -> None:
        """Stop watching everything, until the next `next_check_in`."""
        self._due = math.inf
        for in_flight in (self._extends, self._scorings, self._dropping):
            in_flight.clear()

    # Checks

    def next_check_in(self, now: float) -> float:
        """Return the seconds until the next check."""
        now = self._unblocked(now)
        self._due = now + self._interval
        for extend in self._extends.values():
            last = extend.cancelled if extend.cancelled < math.inf else extend.interrupted
            if last + self.config.grace_s < self._due and self.config.rollout_timeout_s:
                self._due = max(last + self.config.grace_s, now + _SHORTEST_PAUSE_S)
        return self._due - now

    def check(
        self,
        now: float,
        progress: Mapping[str, Sequence[Segment]],
        queued: Collection[str] = (),
        scoring: Collection[int | str] = (),
    ) -> list[Stall]:
        """Return the stalls, each with an action that counts as done. Raises EvaluationStalled unless `patient`.

        `progress`: segments so far of every `extend` in flight; `queued`: those of them that wait in the engine.
        Entries of other rollouts are ignored. `scoring`: keys of the scorings in flight.
        """
        now = self._unblocked(now)
        progress = {i: segments for i, segments in progress.items() if i in self._extends}
        for rollout_id, segments in progress.items():
            extend = self._extends[rollout_id]
            self._record_tokens(rollout_id, extend, extend.began_with + sum(map(len, segments)), now)
        stalls = [s for i in progress if (s := self._check_extend(i, i in queued, now)) is not None]
        # Rollouts of a group that is dropped are interrupted with it.
        stalls = [s for s in stalls if s.group_id not in self._dropping or s.action is not Action.CONTINUE]
        stalls += self._scorings.check(None if self._scoring_blocked() else scoring, now)
        if stalls and not self.patient:
            raise EvaluationStalled(f"watchdog: {'; '.join(stall.what for stall in stalls)}")
        self._counts["stalled_rewards"] += sum(s.is_scoring for s in stalls)
        self._counts["redispatched"] += sum(s.action in (Action.CONTINUE, Action.RESCORE) for s in stalls)
        return stalls

    def describe(self, now: float, most: int = 3) -> str:
        """Describe the rollouts in the engine, the longest without a token first. For any thread."""
        extends = sorted(list(self._extends.items()), key=lambda item: item[1].last_token)
        shown = [e.stall(Action.CONTINUE, i, now - self._blocked_s).what for i, e in extends[:most]]
        if len(extends) > most:
            shown.append(f"{len(extends) - most} more")
        return "; ".join(shown) or "no rollout"

    def stats(self) -> dict[str, float]:
        """Return cumulative counters."""
        return {f"watchdog/{name}": count for name, count in self._counts.items()}

    # Private

    def _unblocked(self, now: float) -> float:
        """Return `now` without the time in which the event loop was blocked."""
        late = now - self._blocked_s - self._due
        if self._due < math.inf and late > self._interval:
            self._blocked_s += late
        return now - self._blocked_s

    def _record_tokens(self, rollout_id: str, extend: _Extend, num_tokens: int, now: float) -> None:
        if num_tokens > extend.num_tokens:
            extend.num_tokens, extend.last_token = num_tokens, now
            self._any_token = now
            self._stalls.pop(rollout_id, None)

    def _check_extend(self, rollout_id: str, queued: bool, now: float) -> Stall | None:
        """Return the next action for this rollout if it is late."""
        config, extend = self.config, self._extends[rollout_id]
        last = max(extend.last_token, self._any_token) if queued else extend.last_token
        since, limit = {
            "running": (last, config.rollout_timeout_s),
            "interrupted": (extend.interrupted, config.grace_s),
            "cancelled": (extend.cancelled, config.grace_s),
        }[extend.state]
        if config.rollout_timeout_s == 0 or now - since < limit:
            return None
        first = not extend.stalled
        if first:
            extend.stalled = True
            self._counts["stalled_rollouts"] += 1
            self._stalls[rollout_id] = self._stalls.get(rollout_id, 0) + 1
        action = self._next_action(rollout_id, extend)
        self._counts["redispatched"] += first and action is Action.CANCEL
        if action in (Action.DROP, Action.ABANDON):
            self._dropping.add(extend.group_id)
        stall = extend.stall(action, rollout_id, now)
        if extend.state == "running":
            extend.interrupted = now
        else:
            extend.cancelled = now
        return stall

    def _next_action(self, rollout_id: str, extend: _Extend) -> Action:
        if extend.state == "running":
            return Action.DROP if self._stalls[rollout_id] >= self.config.max_stalls else Action.CONTINUE
        if extend.state == "cancelled":
            return Action.ABANDON
        return Action.CANCEL_DROPPED if extend.group_id in self._dropping else Action.CANCEL


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
