"""Curricula: how often a task is given, by the pass rates of its earlier visits ([tasks.curriculum]).

    stream ──next task──▶ Curriculum.gives       group scored ──▶ saw ──(end of the step)──▶ pass rates

Tasks are thinned: the stream keeps its order (stream.py), and gives each task with a probability, its weight. Pass
rates change only at the end of a training step, in the order in which groups were admitted. So a resumed run is given
the same tasks as an uninterrupted one. Pure: no clock, no torch.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollover.config import Config
from rollover.config.curriculum import CurriculumConfig
from rollover.functions import CustomFunction, custom_function, described
from rollover.tasks.source import column_of
from rollover.tasks.split import key_of
from rollover.types import Group, Task

_KIND = "tasks.curriculum.kind"
_WEIGHT = "a number from 0 to 1, the probability with which the task is given when its turn comes"


@dataclass(frozen=True, slots=True)
class Seen:
    """Pass rates of a task (or source, or level) from its visits, or from tasks.curriculum.prior_column.

    `pass_rate`: moving average, 0 to 1 (tasks.curriculum.decay). `visits`: number of scored groups; 0: a prior. `last`:
    pass rate of the last visit. `in_row`: number of last visits in the same bucket (easy, hard or normal).
    """

    pass_rate: float
    visits: int = 0
    last: float = 0.0
    in_row: int = 0


@dataclass(frozen=True, slots=True)
class Visit:
    """A scored group: its task and pass rate."""

    task: Task
    pass_rate: float


class Weigher(Protocol):
    """Weights of tasks, as tasks.curriculum.kind names."""

    def weight(self, task: Task, seen: Seen | None) -> float:
        """Return the probability, 0 to 1, with which the task is given when its turn comes. `seen` None: unknown."""
        ...


class Buckets:
    """Gives easy and hard tasks less often than others (prime-rl's difficulty pools; with weights of 0, the filter of
    DAPO's data and others, which drops tasks that are always or never solved)."""

    def __init__(self, config: CurriculumConfig) -> None:
        self.config = config

    def bucket(self, pass_rate: float) -> str:
        if pass_rate >= self.config.easy_from:
            return "easy"
        return "hard" if pass_rate <= self.config.hard_to else "normal"

    def bucket_of(self, seen: Seen) -> str:
        """Return the bucket of a prior, or of the last visits if enough of them agree; else normal."""
        if not seen.visits:
            return self.bucket(seen.pass_rate)
        return self.bucket(seen.last) if seen.in_row >= self.config.visits_in_row else "normal"

    def weight(self, task: Task, seen: Seen | None) -> float:
        bucket = "normal" if seen is None else self.bucket_of(seen)
        return {"easy": self.config.easy_weight, "hard": self.config.hard_weight, "normal": 1.0}[bucket]


class Variance:
    """Weights in proportion to p (1 - p), the variance of a 0/1 reward: a group without variance has no gradient."""

    def __init__(self, config: CurriculumConfig) -> None:
        self.config = config

    def weight(self, task: Task, seen: Seen | None) -> float:
        if seen is None:
            return 1.0
        return max(self.config.min_weight, 4 * seen.pass_rate * (1 - seen.pass_rate))


class CustomWeigher:
    """The user's class, constructed with the Config: `weight(task, seen)`; and, if it learns from visits,
    `update(visits, version)` at the end of each step, `state_dict()` and `load_state_dict(state)` (JSON)."""

    def __init__(self, config: Config) -> None:
        spec = config.tasks.curriculum.kind
        make = custom_function(_KIND, spec, "an object with weight(task, seen)")
        made = make(config)
        methods = {n: getattr(made, n, None) for n in ("weight", "update", "state_dict", "load_state_dict")}
        if not callable(methods["weight"]):
            raise make.refused(f"a {type(made).__name__} without a method weight")
        learns = [name for name in ("update", "state_dict", "load_state_dict") if callable(methods[name])]
        if learns and len(learns) < 3:
            raise make.refused(
                f"a {type(made).__name__} with {', '.join(learns)} alone: update, state_dict and load_state_dict go"
                " together, or a resumed run would not be given the same tasks"
            )
        self.learns = bool(learns)
        returns = {"weight": _WEIGHT, "state_dict": "what JSON can hold"}
        self._own = {
            n: CustomFunction(m, _KIND, spec, returns.get(n, "None")) for n, m in methods.items() if callable(m)
        }

    def weight(self, task: Task, seen: Seen | None) -> float:
        own = self._own["weight"]
        weight = own(task, seen)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
            raise own.refused(f"{described(weight)} for {task.task_id}")
        return float(weight)

    def update(self, visits: list[Visit], version: int) -> None:
        if self.learns:
            self._own["update"](visits, version)

    def state_dict(self) -> Any:
        if not self.learns:
            return None
        own = self._own["state_dict"]
        state = own()
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise own.refused(f"{described(state)}, which is not JSON ({error})") from error

    def load_state_dict(self, state: Any) -> None:
        if self.learns and state is not None:
            self._own["load_state_dict"](state)


@dataclass(slots=True)
class PassedOver:
    """The task of the largest weight, and the first of these, of those passed over since a task was given."""

    best: Task | None = None
    weight: float = 0.0

    def add(self, task: Task, weight: float) -> None:
        if self.best is None or weight > self.weight:
            self.best, self.weight = task, weight


class Curriculum:
    """The curriculum of one run. `passed_over`: cumulative number of tasks that were not given in their turn."""

    def __init__(self, config: CurriculumConfig, weigher: Weigher, seed: int) -> None:
        self.config, self.weigher, self.seed = config, weigher, seed
        self._once: Collection[str] = ()  # labels of sources whose tasks come once
        self.passed_over = 0
        self._by_source = config.by == "source"
        self._buckets = Buckets(config)
        self._seen: dict[str, Seen] = {}
        self._pending: dict[int, Visit] = {}  # by group id, of groups scored since the last step
        self._looked_at: set[int] = set()  # ids of groups that were counted before their step was rolled back
        self._given: list[float] = []  # known pass rates of the tasks given since the last step
        self._given_in_step: float | None = None  # their mean, in the last step

    def ignore(self, sources: Collection[str]) -> None:
        """Count no pass rates by task for these sources (labels): each of their tasks comes once."""
        self._once = sources

    # Giving tasks

    def source_weight(self, label: str) -> float:
        """Return the weight of a source, if pass rates are by source; else 1."""
        return self.weigher.weight(Task("", label, ""), self._seen.get(label)) if self._by_source else 1.0

    def mark(self) -> tuple[int, int]:
        """Return a mark for `back_to`."""
        return self.passed_over, len(self._given)

    def back_to(self, mark: tuple[int, int]) -> None:
        """Undo what was given and passed over since the mark."""
        self.passed_over = mark[0]
        del self._given[mark[1] :]

    def gives(self, task: Task, passed: PassedOver) -> bool:
        """Return whether the next task is given, by a draw that depends on the task and its pass (`attempt`) only. If
        not, add it to `passed`."""
        weight = 1.0 if self._by_source else self.weigher.weight(task, self._seen_of(task))
        if key_of(f"{self.seed}/curriculum/{task.task_id}/{task.attempt}") / 2**64 < weight:
            self.give(task)
            return True
        self.passed_over += 1
        passed.add(task, weight)
        return False

    def give(self, task: Task) -> None:
        """Count a task as given."""
        if (seen := self._seen_of(task)) is not None:
            self._given.append(seen.pass_rate)

    # Visits

    def saw(self, group: Group, pass_rate: float | None) -> None:
        """Count a scored group that is trained or dropped by a filter. `pass_rate` None: it has no reward."""
        if group.group_id in self._looked_at:
            self._looked_at.remove(group.group_id)
        elif pass_rate is not None and not (self.config.by == "task" and group.task.source in self._once):
            self._pending[group.group_id] = Visit(group.task, pass_rate)

    def on_step(self, version: int) -> None:
        """Apply the visits of a step that ended, after which the trainer is at `version`."""
        visits = [self._pending[group_id] for group_id in sorted(self._pending)]
        self._pending.clear()
        for visit in visits:
            key = self._key(visit.task)
            self._seen[key] = self._after(self._seen_of(visit.task), visit.pass_rate)
        if isinstance(self.weigher, CustomWeigher):
            self.weigher.update(visits, version)
        self._given_in_step = math.fsum(self._given) / len(self._given) if self._given else None
        self._given.clear()

    def on_roll_back(self, held_again: Iterable[int]) -> None:
        """Ignore the next visit of these groups, which were counted in steps that were rolled back."""
        self._looked_at.update(held_again)

    def metrics(self) -> dict[str, float]:
        """Return the metrics `curriculum/...`."""
        seen = self._seen.values()
        buckets = Counter(map(self._buckets.bucket_of, seen))
        metrics: dict[str, float] = {
            "curriculum/known": len(seen),
            **{f"curriculum/{bucket}": buckets[bucket] for bucket in ("easy", "normal", "hard")},
            "curriculum/passed_over": self.passed_over,
        }
        if seen:
            metrics["curriculum/pass_rate"] = math.fsum(s.pass_rate for s in seen) / len(seen)
        if self._given_in_step is not None:
            metrics["curriculum/given_pass_rate"] = self._given_in_step
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return JSON, some 50 bytes for each visited task."""
        return {
            "by": self.config.by,
            "seen": {key: [s.pass_rate, s.visits, s.last, s.in_row] for key, s in self._seen.items()},
            "pending": [[i, v.task.to_json(), v.pass_rate] for i, v in self._pending.items()],
            "looked_at": sorted(self._looked_at),
            "given": list(self._given),
            "given_in_step": self._given_in_step,
            "passed_over": self.passed_over,
            "own": self.weigher.state_dict() if isinstance(self.weigher, CustomWeigher) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. Pass rates of another tasks.curriculum.by are dropped."""
        self.passed_over = state["passed_over"]
        self._looked_at = set(state["looked_at"])
        self._pending = {i: Visit(Task.from_json(task), rate) for i, task, rate in state["pending"]}
        if state["by"] == self.config.by:
            self._seen = {key: Seen(*values) for key, values in state["seen"].items()}
        self._given, self._given_in_step = list(state["given"]), state["given_in_step"]
        if isinstance(self.weigher, CustomWeigher):
            self.weigher.load_state_dict(state["own"])

    # Private

    def _after(self, seen: Seen | None, rate: float) -> Seen:
        """Return the statistics after a visit with this pass rate."""
        if seen is None or not seen.visits:
            return Seen(rate, 1, rate, 1)
        decay, bucket = self.config.decay, self._buckets.bucket
        in_row = seen.in_row + 1 if bucket(rate) == bucket(seen.last) else 1
        return Seen(decay * seen.pass_rate + (1 - decay) * rate, seen.visits + 1, rate, in_row)

    def _seen_of(self, task: Task) -> Seen | None:
        known = self._seen.get(self._key(task))
        if known is not None or not self.config.prior_column:
            return known
        prior = column_of(task, self.config.prior_column, "tasks.curriculum.prior_column")
        if prior is None:
            return None
        if isinstance(prior, bool) or not isinstance(prior, int | float) or not 0 <= prior <= 1:
            raise ValueError(
                f"tasks.curriculum.prior_column = {self.config.prior_column!r}: task {task.task_id} has {prior!r}"
                " there; expected a pass rate from 0 to 1, or nothing"
            )
        return Seen(float(prior))

    def _key(self, task: Task) -> str:
        """Return the key of the task's pass rate."""
        if self.config.by == "task":
            return task.task_id
        if self.config.by == "source":
            return task.source
        return json.dumps(column_of(task, self.config.by, "tasks.curriculum.by"), sort_keys=True)


def build_curriculum(config: Config) -> Curriculum | None:
    """Build the curriculum that [tasks.curriculum] names; None if it is off."""
    settings = config.tasks.curriculum
    if not settings.kind:
        return None
    weigher: Weigher
    if settings.kind == "buckets":
        weigher = Buckets(settings)
    else:
        weigher = Variance(settings) if settings.kind == "variance" else CustomWeigher(config)
    return Curriculum(settings, weigher, config.run.seed)
