"""Curricula: how often a task is given, by the pass rates of its earlier visits ([tasks.curriculum]).

    stream ──"is it given?"──▶ Curriculum.gives       group scored ──▶ saw ──(end of the step)──▶ pass rates

Owns the pass rates. They change at the end of a training step alone, in the order in which the groups were admitted:
what comes next depends on no clock, so that a resumed run is given the same tasks as one that was never stopped. A task
is chosen by thinning: the stream keeps its order, and a task whose turn it is is given with a probability, its weight.
Never decides the stream's order (stream.py), nor what passes (algorithms/filters.py). Pure: no clock, no torch.
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
from rollover.functions import OwnFunction, described, own_function
from rollover.tasks.source import column_of
from rollover.tasks.split import key_of
from rollover.types import Group, Task

_KIND = "tasks.curriculum.kind"
_WEIGHT = "a number from 0 to 1, the probability with which the task is given when its turn comes"


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a task (of a source, of a level) from its visits, or from tasks.curriculum.prior_column.

    `pass_rate`: recent, 0 to 1 (tasks.curriculum.decay). `visits`: groups that were scored; 0: it is a prior.
    `last`: the pass rate of the last visit. `in_row`: the last so many visits were all easy, all hard, or all neither.
    """

    pass_rate: float
    visits: int = 0
    last: float = 0.0
    in_row: int = 0


@dataclass(frozen=True, slots=True)
class Visit:
    """A group of this task was scored, and had this pass rate."""

    task: Task
    pass_rate: float


class Weigher(Protocol):
    """How a curriculum weighs: what tasks.curriculum.kind names."""

    def weight(self, task: Task, seen: Seen | None) -> float:
        """The probability, 0 to 1, with which a task is given when its turn comes. None: nothing is known of it."""
        ...


class Buckets:
    """Easy and hard tasks are given less often than the others (prime-rl's difficulty pools; with weights of 0 the
    filter by pass rate of DAPO's data and others, which leaves out what is solved always or never)."""

    def __init__(self, config: CurriculumConfig) -> None:
        self.config = config

    def bucket(self, pass_rate: float) -> str:
        if pass_rate >= self.config.easy_from:
            return "easy"
        return "hard" if pass_rate <= self.config.hard_to else "normal"

    def of(self, seen: Seen) -> str:
        """The bucket of what was seen: of a prior, or of the last visits if enough of them agree."""
        if not seen.visits:
            return self.bucket(seen.pass_rate)
        return self.bucket(seen.last) if seen.in_row >= self.config.visits_in_row else "normal"

    def weight(self, task: Task, seen: Seen | None) -> float:
        bucket = "normal" if seen is None else self.of(seen)
        return {"easy": self.config.easy_weight, "hard": self.config.hard_weight, "normal": 1.0}[bucket]


class Variance:
    """In proportion to p (1 - p), the variance of a reward of 0 or 1: without any, a group teaches nothing."""

    def __init__(self, config: CurriculumConfig) -> None:
        self.config = config

    def weight(self, task: Task, seen: Seen | None) -> float:
        if seen is None:
            return 1.0
        return max(self.config.min_weight, 4 * seen.pass_rate * (1 - seen.pass_rate))


class OwnWeigher:
    """A class of the user's own, made with the Config: `weight(task, seen)`; and, if it learns from visits by itself,
    `update(visits, version)` at the end of each step, with `state_dict()` and `load_state_dict(state)` in JSON."""

    def __init__(self, config: Config) -> None:
        spec = config.tasks.curriculum.kind
        make = own_function(_KIND, spec, "an object with weight(task, seen)")
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
        self._own = {n: OwnFunction(m, _KIND, spec, returns.get(n, "None")) for n, m in methods.items() if callable(m)}

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
    """What was passed over since the last task that was given: the one of the largest weight, the first of these."""

    best: Task | None = None
    weight: float = 0.0

    def add(self, task: Task, weight: float) -> None:
        if self.best is None or weight > self.weight:
            self.best, self.weight = task, weight


class Curriculum:
    """The curriculum of one run. With it off there is none (build_curriculum).

    Cumulative: `passed_over`, how often a task's turn came and it was not given.
    """

    def __init__(self, config: CurriculumConfig, weigher: Weigher, seed: int) -> None:
        self.config, self.weigher, self.seed = config, weigher, seed
        self.once: Collection[str] = ()  # labels of sources whose tasks never come again: set by the stream
        self.passed_over = 0
        self._by_source = config.by == "source"
        self._buckets = Buckets(config)
        self._seen: dict[str, Seen] = {}
        self._pending: dict[int, Visit] = {}  # by group_id: scored since the last step
        self._looked_at: set[int] = set()  # ids of groups that come a second time, as their step was rolled back
        self._given: list[float] = []  # pass rates known of the tasks given since the last step
        self._given_in_step: float | None = None  # their mean, of the last step

    # What is given

    def of_source(self, label: str) -> float:
        """The weight of a source, where it is sources that have pass rates; else 1."""
        return self.weigher.weight(Task("", label, ""), self._seen.get(label)) if self._by_source else 1.0

    def mark(self) -> tuple[int, int]:
        """What `back_to` is given to forget what was given, and passed over, since."""
        return self.passed_over, len(self._given)

    def back_to(self, mark: tuple[int, int]) -> None:
        self.passed_over = mark[0]
        del self._given[mark[1] :]

    def gives(self, task: Task, passed: PassedOver) -> bool:
        """Whether a task is given whose turn has come: a draw that depends on the task and its pass (`attempt`) alone.
        It joins those that were `passed` over if not."""
        weight = 1.0 if self._by_source else self.weigher.weight(task, self._seen_of(task))
        if key_of(f"{self.seed}/curriculum/{task.task_id}/{task.attempt}") / 2**64 < weight:
            self.give(task)
            return True
        self.passed_over += 1
        passed.add(task, weight)
        return False

    def give(self, task: Task) -> None:
        """The task is given, whatever its weight."""
        if (seen := self._seen_of(task)) is not None:
            self._given.append(seen.pass_rate)

    # What was seen

    def saw(self, group: Group, pass_rate: float | None) -> None:
        """A scored group is trained, or a filter dropped it. None: it has no reward."""
        if group.group_id in self._looked_at:
            self._looked_at.remove(group.group_id)
        elif pass_rate is not None and not (self.config.by == "task" and group.task.source in self.once):
            self._pending[group.group_id] = Visit(group.task, pass_rate)

    def on_step(self, version: int) -> None:
        """A step ended, and the trainer is at `version`: what was seen until now counts from here on."""
        visits = [self._pending[group_id] for group_id in sorted(self._pending)]
        self._pending.clear()
        for visit in visits:
            key = self._key(visit.task)
            self._seen[key] = self._after(self._seen_of(visit.task), visit.pass_rate)
        if isinstance(self.weigher, OwnWeigher):
            self.weigher.update(visits, version)
        self._given_in_step = math.fsum(self._given) / len(self._given) if self._given else None
        self._given.clear()

    def on_roll_back(self, held_again: Iterable[int]) -> None:
        """`held_again`: ids of groups that were seen in steps that are lost, and are trained again."""
        self._looked_at.update(held_again)

    def metrics(self) -> dict[str, float]:
        """The keys `curriculum/...`."""
        seen = self._seen.values()
        buckets = Counter(map(self._buckets.of, seen))
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
        """JSON: 50 bytes or so for each task that was visited."""
        return {
            "by": self.config.by,
            "seen": {key: [s.pass_rate, s.visits, s.last, s.in_row] for key, s in self._seen.items()},
            "pending": [[i, v.task.to_json(), v.pass_rate] for i, v in self._pending.items()],
            "looked_at": sorted(self._looked_at),
            "given": list(self._given),
            "given_in_step": self._given_in_step,
            "passed_over": self.passed_over,
            "own": self.weigher.state_dict() if isinstance(self.weigher, OwnWeigher) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Pass rates of another tasks.curriculum.by are forgotten."""
        self.passed_over = state["passed_over"]
        self._looked_at = set(state["looked_at"])
        self._pending = {i: Visit(Task.from_json(task), rate) for i, task, rate in state["pending"]}
        if state["by"] == self.config.by:
            self._seen = {key: Seen(*values) for key, values in state["seen"].items()}
        self._given, self._given_in_step = list(state["given"]), state["given_in_step"]
        if isinstance(self.weigher, OwnWeigher):
            self.weigher.load_state_dict(state["own"])

    # Private

    def _after(self, seen: Seen | None, rate: float) -> Seen:
        """What is known after a visit with this pass rate."""
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
        """By what the pass rate of the task is kept."""
        if self.config.by == "task":
            return task.task_id
        if self.config.by == "source":
            return task.source
        return json.dumps(column_of(task, self.config.by, "tasks.curriculum.by"), sort_keys=True)


def build_curriculum(config: Config) -> Curriculum | None:
    """The curriculum that [tasks.curriculum] names; None where it names none."""
    settings = config.tasks.curriculum
    if not settings.kind:
        return None
    weigher: Weigher
    if settings.kind == "buckets":
        weigher = Buckets(settings)
    else:
        weigher = Variance(settings) if settings.kind == "variance" else OwnWeigher(config)
    return Curriculum(settings, weigher, config.run.seed)
