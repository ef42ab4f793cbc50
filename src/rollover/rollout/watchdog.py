"""The watchdog: notices rollouts and scorings that make no progress, names them, and says what to do about each.

    rollout   no token for rollout_timeout_s ─▶ CONTINUE: interrupt it; the scheduler goes on from the tokens it has
              the max_stalls-th time without a token in between ─▶ DROP: its group, siblings are interrupted
              interrupted, and not back within grace_s ─▶ CANCEL: go on from the tokens that `progress` shows
              cancelled, and not back within grace_s ─▶ ABANDON: nobody waits for it any more, its group is dropped
    scoring   past its limit ─▶ RESCORE: cancel it, score again;  once more ─▶ GIVE_UP: its rewards are missing

A pure state machine: it is told what begins, is interrupted and ends, and what time it is (`now`: seconds of any clock
that does not go back). Never waits, never touches a rollout or a task: the watcher does what it says.

It is about one rollout or scoring that hangs. Where all of them fail, the failure limit ends the run
(failure_limit.py); where the event loop itself stands still, run/blocked_warning.py says so.

What it must not mistake for a stall: a rollout that waits in the engine's queue while others get tokens; a group that
waits while an older one is scored (only the oldest scoring can stall, and the next one's time begins when it has gone);
time in which the event loop stood still, so that nobody could look.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollover.config import WatchdogConfig
from rollover.engine.validate import why_no_continuation
from rollover.types import Segment, StopReason, group_name

OFF = WatchdogConfig(rollout_timeout_s=0, reward_timeout_s=0)  # the other limits are not the watchdog's
_LOOKS_PER_LIMIT = 4
_SHORTEST_PAUSE_S = 1e-3


class Action(enum.Enum):
    """What is done about a stall; the value completes its message."""

    CONTINUE = "it is interrupted and continued from there"
    CANCEL = "it does not come back, so it is cancelled and continued from there"
    CANCEL_DROPPED = "it does not come back, so it is cancelled; its group is being dropped"
    DROP = "it stalls once too often, so its group is dropped (stalled)"
    ABANDON = "not even its cancellation ends it, so nobody waits for it and its group is dropped (stalled)"
    RESCORE = "it is cancelled and scored again"
    GIVE_UP = "it is cancelled and its rewards are missing"


@dataclass(frozen=True, slots=True)
class Stall:
    """A rollout, or a scoring (of a whole group: `rollout_id` None), that makes no progress. Prints as one line.

    `state`: running, interrupted, cancelled or scoring. `age_s`: since its `extend`, or its scoring, began.
    `num_tokens`: all that it is known to have; the last of them is `token_age_s` old, by the last looks.
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
        """What it was told by: the id of the rollout, or of the group that is scored together."""
        return self.group_id if self.rollout_id is None else self.rollout_id

    @property
    def what(self) -> str:
        """Who stalls, its state, age and last token."""
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
    """A rollout in the engine. `began_with` and `num_tokens` count all its tokens, those of earlier segments too."""

    group_id: int
    started: float
    began_with: int
    num_tokens: int
    last_token: float  # when a look first saw the last token; `started` before the first
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
    """The scorings under way, the oldest first. `limit_s`: what the oldest of them may take; 0: any time."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._begun: dict[int | str, tuple[int, float]] = {}
        """By group id, or by the id of a rollout scored alone: (group id, when it began)."""
        self._oldest_since = 0.0
        """When the last one that was the oldest ended."""
        self._again: set[int | str] = set()
        """Those that were scored again."""

    @property
    def keys(self) -> list[int | str]:
        return list(self._begun)

    def begin(self, key: int | str, group_id: int, now: float) -> None:
        """A scoring begins, or begins again: then it is the newest."""
        self._pop(key, now)
        self._begun[key] = group_id, now

    def end(self, key: int | str, now: float) -> None:
        self._pop(key, now)
        self._again.discard(key)

    def clear(self) -> None:
        self._begun.clear()
        self._again.clear()

    def look(self, under_way: Collection[int | str] | None, now: float) -> list[Stall]:
        """The oldest of them, if it is under way still and its time is up. None: nobody can score now, which counts
        for none of them."""
        if under_way is None:
            self._oldest_since = now
            return []
        oldest = next(iter(self._begun), None)
        if oldest is None or oldest not in under_way or self.limit_s == 0:
            return []
        group_id, started = self._begun[oldest]
        if now - max(started, self._oldest_since) < self.limit_s:
            return []
        action = Action.GIVE_UP if oldest in self._again else Action.RESCORE
        self._again.add(oldest)
        return [Stall(action, group_id, oldest if isinstance(oldest, str) else None, "scoring", now - started)]

    def _pop(self, key: int | str, now: float) -> None:
        was_oldest = next(iter(self._begun), None) == key
        self._begun.pop(key, None)
        if was_oldest:
            self._oldest_since = now


class GivenUp(Exception):
    """Ends generation at once, without the tokens of what runs (an evaluation that cannot be complete)."""


class Watchdog:
    """Watches the rollouts and scorings in flight. `scoring_s`: how long a group's scoring may take by its own limits.
    `patient`: return an action for each stall. If False, the first stall raises GivenUp. `nobody_scores`: whether
    scorings wait for someone who could do them: no scoring's time runs then. `max_filtered_steps`: as of FailureLimit.

    Counters, cumulative: see `stats`.
    """

    def __init__(
        self,
        config: WatchdogConfig = OFF,
        scoring_s: float = 0.0,
        *,
        patient: bool = True,
        nobody_scores: Callable[[], bool] = lambda: False,
        max_filtered_steps: int = 10,
    ) -> None:
        self.config, self.patient, self._nobody_scores = config, patient, nobody_scores
        self.max_filtered_steps = max_filtered_steps
        self._extends: dict[str, _Extend] = {}
        self._stalls: dict[str, int] = {}  # by rollout id: in a row, without a token in between
        self._scorings = _Scorings(config.reward_timeout_s and config.reward_timeout_s + scoring_s)
        self._dropping: set[int] = set()  # groups that are dropped as soon as none of their rollouts runs
        self._any_token = 0.0  # when a token of any rollout was last seen
        self._due = math.inf
        self._stood_still = 0.0  # seconds in which nobody could look: they count for nobody
        self._counts = dict.fromkeys(("stalled_rollouts", "stalled_rewards", "redispatched"), 0)

    @property
    def is_on(self) -> bool:
        return self.config.rollout_timeout_s > 0 or self.config.reward_timeout_s > 0

    @property
    def _interval(self) -> float:
        """Seconds between two looks; so much later than its limit a stall is noticed at worst."""
        limits = [self.config.rollout_timeout_s] if self.config.rollout_timeout_s else []
        limits += [self._scorings.limit_s] if self._scorings.limit_s else []
        return min(limits) / _LOOKS_PER_LIMIT

    @property
    def scoring(self) -> list[int | str]:
        """Ids of the groups, and of the single rollouts, being scored, the oldest scoring first."""
        return self._scorings.keys

    # What was done

    def on_start(self, rollout_id: str, group_id: int, num_tokens: int, now: float) -> None:
        """Its `extend` begins; it has `num_tokens` already."""
        now -= self._stood_still
        self._extends[rollout_id] = _Extend(group_id, now, num_tokens, num_tokens, now)

    def on_interrupt(self, rollout_ids: Iterable[str], now: float) -> None:
        """They were told to return, whoever decided it."""
        for extend in filter(None, map(self._extends.get, rollout_ids)):
            extend.interrupted = min(extend.interrupted, now - self._stood_still)

    def on_end(self, rollout_id: str, num_tokens: int, now: float) -> None:
        """Its `extend` returned, or nobody waits for it any more; it has `num_tokens` now."""
        self._see(rollout_id, self._extends.pop(rollout_id), num_tokens, now - self._stood_still)

    def on_score(self, group_id: int, now: float, key: int | str | None = None) -> None:
        """A scoring begins, or begins again: then it is the newest.

        `key`: the group's id (None, too), or that of a rollout of it that is scored alone.
        """
        self._scorings.begin(group_id if key is None else key, group_id, now - self._stood_still)

    def on_scored(self, key: int | str, now: float) -> None:
        self._scorings.end(key, now - self._stood_still)

    def on_leave(self, rollout_ids: Iterable[str]) -> None:
        """They left the system."""
        for rollout_id in rollout_ids:
            self._stalls.pop(rollout_id, None)

    def clear(self) -> None:
        """Nothing is in flight any more, and nobody looks until the next `pause`."""
        self._due = math.inf
        for in_flight in (self._extends, self._scorings, self._dropping):
            in_flight.clear()

    # Questions

    def pause(self, now: float) -> float:
        """Seconds until the next look."""
        now = self._forgive(now)
        self._due = now + self._interval
        for extend in self._extends.values():
            last = extend.cancelled if extend.cancelled < math.inf else extend.interrupted
            if last + self.config.grace_s < self._due and self.config.rollout_timeout_s:
                self._due = max(last + self.config.grace_s, now + _SHORTEST_PAUSE_S)
        return self._due - now

    def look(
        self,
        now: float,
        progress: Mapping[str, Sequence[Segment]],
        queued: Collection[str] = (),
        scoring: Collection[int | str] = (),
    ) -> list[Stall]:
        """What stalls, and what to do about it: that counts as done. GivenUp at the first stall, unless `patient`.

        `progress`: of every `extend` still under way, its segments so far; `queued`: those of them that wait for room.
        What an engine says of others is of no account. `scoring`: the groups, and single rollouts, whose scoring is
        still under way.
        """
        now = self._forgive(now)
        progress = {i: segments for i, segments in progress.items() if i in self._extends}
        for rollout_id, segments in progress.items():
            extend = self._extends[rollout_id]
            self._see(rollout_id, extend, extend.began_with + sum(map(len, segments)), now)
        stalls = [s for i in progress if (s := self._look_at(i, i in queued, now)) is not None]
        # A sibling of what is dropped is interrupted with it: there is nothing else to say about it.
        stalls = [s for s in stalls if s.group_id not in self._dropping or s.action is not Action.CONTINUE]
        stalls += self._scorings.look(None if self._nobody_scores() else scoring, now)
        if stalls and not self.patient:
            raise GivenUp(f"watchdog: {'; '.join(stall.what for stall in stalls)}")
        self._counts["stalled_rewards"] += sum(s.is_scoring for s in stalls)
        self._counts["redispatched"] += sum(s.action in (Action.CONTINUE, Action.RESCORE) for s in stalls)
        return stalls

    def describe(self, now: float, most: int = 3) -> str:
        """What the engine holds, the longest without a token first. For any thread."""
        extends = sorted(list(self._extends.items()), key=lambda item: item[1].last_token)
        shown = [e.stall(Action.CONTINUE, i, now - self._stood_still).what for i, e in extends[:most]]
        if len(extends) > most:
            shown.append(f"{len(extends) - most} more")
        return "; ".join(shown) or "no rollout"

    def stats(self) -> dict[str, float]:
        """Cumulative counters."""
        return {f"watchdog/{name}": count for name, count in self._counts.items()}

    # Private

    def _forgive(self, now: float) -> float:
        """`now` less the time in which nobody could look."""
        late = now - self._stood_still - self._due
        if self._due < math.inf and late > self._interval:
            self._stood_still += late
        return now - self._stood_still

    def _see(self, rollout_id: str, extend: _Extend, num_tokens: int, now: float) -> None:
        if num_tokens > extend.num_tokens:
            extend.num_tokens, extend.last_token = num_tokens, now
            self._any_token = now
            self._stalls.pop(rollout_id, None)

    def _look_at(self, rollout_id: str, queued: bool, now: float) -> Stall | None:
        """The next step down for this rollout, if its time is up."""
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


def salvaged(segments: Sequence[Segment], num_tokens: int, remaining: int) -> list[Segment]:
    """What a cancelled `extend` is taken to have returned, when `progress` had shown `segments`.

    These, if a rollout that has `num_tokens` and may get `remaining` more can go on from them; else none.
    """
    kept = [s for s in segments if len(s)]
    paused = all(s.stop_reason is StopReason.PAUSED for s in kept)
    return kept if kept and paused and why_no_continuation(kept, num_tokens, remaining) is None else []


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
