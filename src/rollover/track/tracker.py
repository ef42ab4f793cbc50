"""Events of a run: `Tracker`, the base class of ours and of custom ones, and `Trackers`, all trackers of a run.

    the run ──one call for each event──▶ Trackers ──▶ metrics, evaluations, rollouts, trace, live view, health, custom
                                                      trackers, and adapters of external ones (plugins/trackers/)

Owns the events and their order. A failing tracker of ours ends the run; a failing custom one is reported once and
counted. track/build.py chooses the trackers of a run.
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
    """The run, for its trackers. `config`: the content of config.resolved.json. `resumed`: by `--resume`."""

    name: str
    directory: Path
    config: Mapping[str, Any]
    resumed: bool


@dataclass(frozen=True, slots=True)
class RecordedCredit:
    """The components of a rollout's advantage, in the step that trained it.

    `compared`: rollouts of a group with the same number were compared; None: with no other (an untrained role, or the
    greedy baseline). `reward`: of its trajectory, after `terms`, normalisation and clipping ([rewards]); None if
    missing. `terms`: terms added to the score, by name. `kl_penalty`: penalty subtracted from the reward, None without
    one. `left_out`: the reason why none of its tokens is in the loss, "" if some may be.
    """

    compared: int | None
    reward: float | None
    terms: Mapping[str, float]
    kl_penalty: float | None = None
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group that left the run: trained (`dropped` is None), or dropped for a reason. Read-only.

    One entry per rollout, in order. `completions`: texts. `advantages`: mean over its loss tokens, None without one
    from its rewards. `credits`: components of the advantage, None if in no batch. `tokens`: per-token statistics, None
    if not recorded or without loss tokens. The last two are empty if no rollout has any.
    """

    group: Group
    completions: Sequence[str]
    advantages: Sequence[float | None]
    dropped: DropReason | None = None
    credits: Sequence[RecordedCredit | None] = ()
    tokens: Sequence[TokenStats | None] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """The point from which a run continues: after `step`; -1: the start, before the first evaluation.

    Records after `step` were undone and will be sent again. So were groups that were sent with `step` but are in the
    run again: those in `held` (in the cache), and all from `next_group_id` on (None: none).
    """

    step: int
    held: Collection[int] = ()
    next_group_id: int | None = None

    def is_repeated(self, group_id: int) -> bool:
        return group_id in self.held or (self.next_group_id is not None and group_id >= self.next_group_id)


class Tracker:
    """Receiver of the events of a run. Every method does nothing: a tracker overrides those that it needs.

    The thread of the run calls them one after the other, and waits for them.
    """

    def on_start(self, run: RunInfo) -> None:
        """Start, before everything else. Nothing is loaded yet."""

    def truncate(self, cut: Cut) -> None:
        """Remove everything after `cut`, before the first step of a process and after a backend failure."""

    def on_step(self, row: Row) -> None:
        """Log a step by its row of metrics.jsonl (docs/metrics.md)."""

    def on_eval(self, row: Mapping[str, Any]) -> None:
        """Log an evaluation by its row of eval.jsonl."""

    def on_groups(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        """Log the groups that left the run since the last call.

        These are the groups that `step` trained (sent before its row), and dropped groups.
        """

    def on_phase(self, name: str) -> None:
        """Show the phase that begins: "generating", "training", "writing a checkpoint"."""

    def on_message(self, text: str) -> None:
        """Show a line for the user."""

    def close(self) -> None:
        """End, also after an error."""

    @property
    def wants_groups(self) -> bool:
        """Whether it uses groups; their texts are decoded only for trackers that do."""
        return type(self).on_groups is not Tracker.on_groups


class CountingTracker(Tracker):
    """A tracker with counters of its own in the row of each step."""

    def stats(self) -> dict[str, float]:
        """Return counters by key; equal keys of several trackers are summed."""
        raise NotImplementedError


class CustomTracker(CountingTracker):
    """Wrapper of a custom tracker, named `spec` in `track.trackers`. An exception is reported once and counted; the run
    continues and keeps calling it. It gets copies of rows and groups."""

    def __init__(self, tracker: Tracker, spec: str) -> None:
        self.tracker, self.spec, self.failed = tracker, spec, 0

    def on_start(self, run: RunInfo) -> None:
        self._call(lambda: self.tracker.on_start(run))

    def truncate(self, cut: Cut) -> None:
        self._call(lambda: self.tracker.truncate(cut))

    def on_step(self, row: Row) -> None:
        self._call(lambda: self.tracker.on_step(dict(row)))

    def on_eval(self, row: Mapping[str, Any]) -> None:
        self._call(lambda: self.tracker.on_eval(dict(row)))

    def on_groups(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        self._call(lambda: self.tracker.on_groups(step, [_copied(recorded) for recorded in groups]))

    def on_phase(self, name: str) -> None:
        self._call(lambda: self.tracker.on_phase(name))

    def on_message(self, text: str) -> None:
        self._call(lambda: self.tracker.on_message(text))

    def close(self) -> None:
        self._call(self.tracker.close)

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

    def _call(self, event: Callable[[], object]) -> None:
        try:
            result = event()
            if inspect.iscoroutine(result):
                result.close()
                raise TypeError(f"{result.__qualname__} is an async def, which is never awaited: write def")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # boundary: the user's tracker
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failed += 1
        if self.failed == 1:
            logger.warning(
                f"track.trackers: {self.spec} failed: {explained(error)}; the run continues, and events that it missed"
                " are not sent again (trackers/failed counts; reported once)"
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
    """All trackers of a run by name, called in the order of adding. A context manager: forwards log messages to them,
    and closes them."""

    def __init__(self) -> None:
        self.named: dict[str, Tracker] = {}

    def add(self, name: str, tracker: Tracker) -> None:
        assert name not in self.named, f"two trackers are named {name}"
        self.named[name] = tracker

    def of_type(self, kind: type[Kind]) -> Kind:
        """Return the tracker of that class."""
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
        with ExitStack() as stack:  # closes all, even if one raises
            for tracker in self.named.values():
                stack.callback(tracker.close)

    @property
    def wants_groups(self) -> bool:
        return any(tracker.wants_groups for tracker in self.named.values())

    def stats(self) -> dict[str, float]:
        """Return the summed counters of the trackers that `track.trackers` names."""
        sums: dict[str, float] = {}
        for tracker in self.named.values():
            for key, value in tracker.stats().items() if isinstance(tracker, CountingTracker) else ():
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
