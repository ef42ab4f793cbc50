"""Who is told what happens in a run: `Tracker`, which ours and the user's own extend, and `Trackers`, all of a run.

    the run ──one call for each event──▶ Trackers ──▶ metrics, evaluations, rollouts, trace, live, health, your own,
                                                      and tools of others, in processes of their own (trackers/)

Owns what the events are, their order, and what becomes of a tracker that fails: one of ours raises; one of the user's
own is reported once and counted, and the run goes on. Which trackers a run has: track/build.py. None changes a run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rollover.functions import explained
from rollover.logs import messages_to
from rollover.track.token_stats import TokenStats
from rollover.types import DropReason, Group, copied

logger = logging.getLogger(__name__)

Row = Mapping[str, float | int | None]
Kind = TypeVar("Kind", bound="Tracker")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run, as its trackers are told of it. `config`: what config.resolved.json holds. `resumed`: an earlier process
    made a part of it."""

    name: str
    directory: Path
    config: Mapping[str, Any]
    resumed: bool


@dataclass(frozen=True, slots=True)
class RecordedCredit:
    """What the advantage of a rollout was made of, in the step that trained it.

    `compared`: rollouts of one group that have the same number were compared; None: with no other (a role that is not
    trained, or the greedy rollout that the others are compared with). `reward`: that of its trajectory, after `terms`,
    normalisation and clipping ([rewards]); None where it is missing. `terms`: what was added to the score, by name.
    `kl_penalty`: what the KL to the reference takes off the reward then; None without one. `left_out`: why none of its
    tokens is in the loss, "" where some may be.
    """

    compared: int | None
    reward: float | None
    terms: Mapping[str, float]
    kl_penalty: float | None = None
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group that left the run: trained (`dropped` is None), or dropped for a reason. To be read, not changed.

    Of each rollout, in order: `completions` its text; `advantages` one number, the mean of its loss tokens, None where
    it has none of its rewards; `credits` what that was made of, None where it was in no batch; `tokens` what training
    made of its tokens, None where that is not wanted or no token came to the loss. The last two are empty where no
    rollout has any.
    """

    group: Group
    completions: Sequence[str]
    advantages: Sequence[float | None]
    dropped: DropReason | None = None
    credits: Sequence[RecordedCredit | None] = ()
    tokens: Sequence[TokenStats | None] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a run goes on from: after `step`. -1: from its very beginning, before the first evaluation.

    What was told of later steps does not count, and they are told again. So it is with groups that were told together
    with `step` itself but are in the run again: those in `held`, which are in the cache, and all from `next_group_id`
    on (None: there are none of these).
    """

    step: int
    held: Collection[int] = ()
    next_group_id: int | None = None

    def comes_again(self, group_id: int) -> bool:
        return group_id in self.held or (self.next_group_id is not None and group_id >= self.next_group_id)


class Tracker:
    """Is told of a run. Every method does nothing: a tracker defines those that it needs.

    They are called one after the other, in the thread of the run, which waits for them.
    """

    def on_start(self, run: RunInfo) -> None:
        """Once, before everything else. Nothing is loaded yet."""

    def truncate(self, cut: Cut) -> None:
        """Forget what comes after `cut`: the run begins or goes on there. Before the first step of a process, and where
        the trainer's backend was lost."""

    def on_step(self, row: Row) -> None:
        """A step was trained: its row of metrics.jsonl (docs/metrics.md)."""

    def on_eval(self, row: Mapping[str, Any]) -> None:
        """An evaluation was made: its row of eval.jsonl."""

    def on_groups(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        """Groups that left the run since the last call: those that `step` trained, if it is told before its row, and
        those that were dropped."""

    def on_phase(self, name: str) -> None:
        """The run is busy with something else from now on: "generating", "training", "writing a checkpoint"."""

    def on_message(self, text: str) -> None:
        """A line for the user."""

    def close(self) -> None:
        """Once, at the end, also when an error ends the run."""

    @property
    def wants_groups(self) -> bool:
        """Whether it does anything with groups: their texts are decoded only if a tracker does."""
        return type(self).on_groups is not Tracker.on_groups


class Counted(Tracker):
    """A tracker that counts something about itself, for the row of each step."""

    def stats(self) -> dict[str, float]:
        """Counters by key. What several trackers have by one key is summed."""
        raise NotImplementedError


class OwnTracker(Counted):
    """A tracker of the user's own, which `track.trackers` names as `spec`. Whatever it raises is reported once and
    counted: the run goes on, and goes on telling it. It gets copies of rows and groups."""

    def __init__(self, tracker: Tracker, spec: str) -> None:
        self.tracker, self.spec, self.failed = tracker, spec, 0

    def on_start(self, run: RunInfo) -> None:
        self._tell(lambda: self.tracker.on_start(run))

    def truncate(self, cut: Cut) -> None:
        self._tell(lambda: self.tracker.truncate(cut))

    def on_step(self, row: Row) -> None:
        self._tell(lambda: self.tracker.on_step(dict(row)))

    def on_eval(self, row: Mapping[str, Any]) -> None:
        self._tell(lambda: self.tracker.on_eval(dict(row)))

    def on_groups(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        self._tell(lambda: self.tracker.on_groups(step, [_copied(recorded) for recorded in groups]))

    def on_phase(self, name: str) -> None:
        self._tell(lambda: self.tracker.on_phase(name))

    def on_message(self, text: str) -> None:
        self._tell(lambda: self.tracker.on_message(text))

    def close(self) -> None:
        self._tell(self.tracker.close)

    @property
    def wants_groups(self) -> bool:
        try:
            return bool(self.tracker.wants_groups)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # boundary: the user's tracker
            self._fail(error)
            return False

    def stats(self) -> dict[str, float]:
        return {"trackers/failed": self.failed}

    def _tell(self, event: Callable[[], object]) -> None:
        try:
            answer = event()
            if inspect.iscoroutine(answer):
                answer.close()
                raise TypeError(f"{answer.__qualname__} is an async def, which nobody awaits: write def")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # boundary: the user's tracker
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failed += 1
        if self.failed == 1:
            logger.warning(
                f"track.trackers: {self.spec} failed: {explained(error)}; the run goes on without what it missed"
                " (trackers/failed counts; this is said once)"
            )


def _copied(recorded: RecordedGroup) -> RecordedGroup:
    return replace(
        recorded,
        group=copied(recorded.group),
        completions=list(recorded.completions),
        advantages=list(recorded.advantages),
        credits=list(recorded.credits),
        tokens=[deepcopy(of) for of in recorded.tokens],
    )


class Trackers(Tracker):
    """All trackers of a run, by name, told in the order in which they were added. A context manager: within it they get
    what is logged, and it closes them."""

    def __init__(self) -> None:
        self.named: dict[str, Tracker] = {}

    def add(self, name: str, tracker: Tracker) -> None:
        assert name not in self.named, f"two trackers are named {name}"
        self.named[name] = tracker

    def the(self, kind: type[Kind]) -> Kind:
        """The one of that class."""
        return next(tracker for tracker in self.named.values() if isinstance(tracker, kind))

    def on_start(self, run: RunInfo) -> None:
        for tracker in self.named.values():
            tracker.on_start(run)

    def truncate(self, cut: Cut) -> None:
        for tracker in self.named.values():
            tracker.truncate(cut)

    def on_step(self, row: Row) -> None:
        for tracker in self.named.values():
            tracker.on_step(row)

    def on_eval(self, row: Mapping[str, Any]) -> None:
        for tracker in self.named.values():
            tracker.on_eval(row)

    def on_groups(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        for tracker in self.named.values():
            tracker.on_groups(step, groups)

    def on_phase(self, name: str) -> None:
        for tracker in self.named.values():
            tracker.on_phase(name)

    def on_message(self, text: str) -> None:
        for tracker in self.named.values():
            tracker.on_message(text)

    def close(self) -> None:
        with ExitStack() as stack:  # each is closed, whatever another raises
            for tracker in self.named.values():
                stack.callback(tracker.close)

    @property
    def wants_groups(self) -> bool:
        return any(tracker.wants_groups for tracker in self.named.values())

    def stats(self) -> dict[str, float]:
        """What those count that `track.trackers` names; nothing without them."""
        sums: dict[str, float] = {}
        for tracker in self.named.values():
            for key, value in tracker.stats().items() if isinstance(tracker, Counted) else ():
                sums[key] = sums.get(key, 0) + value
        return sums

    def __enter__(self) -> Self:
        self._messages = messages_to(self.on_message)
        self._messages.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.on_phase("done" if kind is None else "stopped")
            self.close()
        finally:
            self._messages.__exit__(None, None, None)
