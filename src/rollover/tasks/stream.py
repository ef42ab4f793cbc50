"""The stream of tasks: sources mixed by weight, split into train and eval, resumable from a small state.

Owns the order of tasks: mixing, epochs, shuffling and cursors. Each choice is a function of the seed and a counter, so
a restored stream continues exactly.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollover.config import RewardsConfig, TasksConfig, TaskSourceConfig
from rollover.rewards.routing import choose_reward
from rollover.tasks.curriculum import Curriculum, PassedOver
from rollover.tasks.source import (
    FailedProblem,
    SourceSetup,
    TaskSource,
    build_source,
    labels_of,
    order_value,
    problems_of,
)
from rollover.tasks.split import Comparison, Split, SplitName, comparison_by, key_of, problem_text
from rollover.types import Task

logger = logging.getLogger(__name__)

# A generator without a new problem of the wanted side in so many attempts is exhausted.
MAX_CANDIDATES = 10_000
MAX_ROWS = 50_000  # rows of a dataset that are read before the run, so that it takes no minutes
MAX_FAILED = 1000  # consecutive failed problems after which a source is considered broken
_NAMED = 10


@dataclass(slots=True)
class _Cursor:
    """Position in a source: problem `position` of pass `epoch`."""

    setup: SourceSetup
    source: TaskSource
    same: Comparison
    max_epochs: int  # of a finite source; 0: unlimited
    shuffle: bool
    order_column: str = ""
    share: float = 1.0  # sampling weight among the sources; 0: never trained
    epoch: int = 0
    position: int = 0
    exhausted: bool = False
    spent: bool = False  # exhausted because the curriculum gives all its problems weight 0
    order: tuple[tuple[int, range], list[int]] | None = None  # (epoch, rows) shuffled last, and their order

    def __post_init__(self) -> None:
        if self.order_column and self.source.num_problems is None:
            raise ValueError(
                f"tasks.sources.order_column = {self.order_column!r}: the rows of {self.source.label} come one by one,"
                " and cannot be sorted. Remove it, or give them as a list"
            )

    def candidates(self) -> Iterator[Task | FailedProblem]:
        """Yield the problems from here on, advancing the cursor."""
        while self.max_epochs == 0 or self.epoch < self.max_epochs:
            while self.position in (rows := self.source.together(self.position)):
                self.position += 1
                number = self._in_order(rows)[self.position - 1 - rows.start]
                try:
                    problem = replace(self.source.problem(number), attempt=self.epoch)
                except FailedProblem as failed:
                    problem = failed
                yield problem
            self.epoch, self.position = self.epoch + 1, 0

    def _in_order(self, rows: range) -> list[int]:
        """Return these numbers in the order of this epoch."""
        if self.order is None or self.order[0] != (self.epoch, rows):
            numbers = list(rows)
            if self.shuffle and len(rows) > 1:
                seed = f"{self.setup.seed}/{self.epoch}" + (f"/{rows.start}" if rows.start else "")
                random.Random(seed).shuffle(numbers)
            if self.order_column:  # a stable sort: equal ones stay shuffled
                numbers.sort(key=lambda number: order_value(self.source, number, self.order_column))
            self.order = (self.epoch, rows), numbers
        return self.order[1]

    def keys(self, problem: Task) -> tuple[int, ...]:
        """Return the problem's keys for split.py: of its comparison text, then of its own text."""
        texts = [self.same(problem)] if self.same is problem_text else [self.same(problem), problem_text(problem)]
        return tuple(map(key_of, texts))

    @property
    def by_file(self) -> bool:
        """Whether its held-out problems are named instead of chosen by a hash."""
        return self.setup.config.names_held_out

    @property
    def max_candidates(self) -> int:
        return self.source.num_problems or MAX_CANDIDATES


def decorated(problem: Task, tasks: TasksConfig) -> Task:
    """Add the system prompt and the instruction, and put a plain prompt into a user message (tasks.chat)."""
    instruction = f"\n{tasks.instruction}" if tasks.instruction else ""
    if problem.prompt is not None and not tasks.chat:
        return replace(problem, prompt=problem.prompt + instruction)
    prompt = problem.prompt
    messages = list(problem.messages or ()) if prompt is None else [{"role": "user", "content": prompt}]
    if instruction:
        last = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)
        if last is None:
            raise ValueError(f"task {problem.task_id!r} has no user message to put tasks.instruction into")
        messages[last] = {"role": "user", "content": _with_text(messages[last]["content"], instruction)}
    if tasks.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": tasks.system_prompt})
    return replace(problem, messages=tuple(messages), prompt=None, plain=problem.plain or prompt is not None)


def _with_text(content: Any, text: str) -> Any:
    """Append text to a message's content, a text or a list of parts."""
    if isinstance(content, str):
        return content + text
    if content[-1]["type"] == "text":
        return [*content[:-1], {"type": "text", "text": content[-1]["text"] + text}]
    return [*content, {"type": "text", "text": text}]


class TaskStream:
    """Tasks of one side of the split, in an order that depends on (tasks, seed, split) only.

    train: generators are endless, datasets make `tasks.epochs` passes, and `Task.attempt` is the pass. eval: every text
    once. No problem is on both sides (split.py), and no text of a dataset is: if problems are compared by other keys
    than their texts, all rows are read before the first task. A generator's problems are compared with rows of datasets
    by keys and texts, with each other by keys, so equal texts need equal keys.

    `rewards`: for sources without their own reward. `curriculum`: decides whether a training problem is given in its
    turn; if it gives none in a whole pass, the one of the largest weight is given. `may_be_empty`: allow no sources.

    A row's system message replaces tasks.system_prompt. Failed problems are skipped, counted (`num_failed`), and the
    first ones logged. ValueError for unusable sources, and if no problem is left for the side.
    """

    def __init__(
        self,
        tasks: TasksConfig,
        seed: int,
        split: SplitName,
        *,
        rewards: RewardsConfig,
        curriculum: Curriculum | None = None,
        may_be_empty: bool = False,
    ) -> None:
        if not tasks.sources and not may_be_empty:
            raise ValueError("tasks.sources is empty: add a [[tasks.sources]] table")
        self.tasks, self.seed = tasks, seed
        self.split: SplitName = split
        self.curriculum = curriculum
        self._draws = 0
        self._known_fingerprint: dict[str, Any] | None = None
        self.num_failed = 0
        self._last_failed: FailedProblem | None = None
        self._seen: set[int] = set()  # eval only: texts already given
        self._on_neither_side: set[int] = set()  # eval only: keys of held-out problems that are also trained rows
        self.setups = list(self._setups(rewards))
        self._cursors = [self._cursor(setup) for setup in self.setups]
        temperature = tasks.mixing_temperature if split == "train" else 0.0
        for cursor, share in zip(
            self._cursors, _shares_of([(c.setup, c.source) for c in self._cursors], temperature), strict=True
        ):
            cursor.share = share
        if curriculum is not None:
            curriculum.ignore({c.source.label for c in self._cursors if c.source.endless or c.max_epochs == 1})
        self._rule = self._make_split()

    def next(self) -> Task | None:
        """Return the next task; None once all sources are exhausted (eval: or have no new problem)."""
        while active := [(c, share) for c in self._cursors if not c.exhausted and (share := self._share(c))]:
            cursor = self._choose(active)
            problem = self._next_of(cursor)
            if problem is not None:
                return decorated(cursor.setup.rewarded(problem), self.tasks)
            cursor.exhausted = True
        return None

    def take(self, num_tasks: int) -> list[Task]:
        """Return the next `num_tasks` tasks, or as many as there are. ValueError without any."""
        taken = list(itertools.islice(iter(self.next, None), num_tasks))
        if num_tasks > 0 and not taken:
            first = self._cursors[0]
            raise ValueError(_nothing_left(self, first, first.max_candidates, self.num_failed, self._last_failed))
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return JSON. Its size does not grow with the number of given tasks (eval: some 8 bytes for each)."""
        return {
            "draws": self._draws,
            "num_failed": self.num_failed,
            "fingerprint": self._fingerprint(),
            "sources": [
                {
                    "label": c.source.label,
                    "epoch": c.epoch,
                    "position": c.position,
                    "exhausted": c.exhausted,
                    "spent": self.tasks.curriculum.model_dump() if c.spent else None,
                }
                for c in self._cursors
            ],
            "seen": sorted(self._seen),
        }

    def counted(self) -> list[tuple[TaskSourceConfig, TaskSource, list[tuple[int, ...]]]]:
        """Return each source with a known number of problems, with the keys of the first MAX_ROWS, in order."""
        return [
            (cursor.setup.config, cursor.source, [cursor.keys(p) for p in problems_of(cursor.source, MAX_ROWS)])
            for cursor in self._cursors
            if cursor.source.num_problems
        ]

    def streamed(self) -> list[str]:
        """Return the labels of finite sources with an unknown number of problems."""
        sources = [cursor.source for cursor in self._cursors]
        return [s.label for s in sources if not s.endless and s.num_problems is None]

    def accepts(self, keys: Sequence[int], by_file: bool) -> bool:
        """Return whether a problem with these keys is on this side of the split."""
        return self._rule.accepts(keys, self.split, by_file)

    @property
    def num_on_neither_side(self) -> int:
        """Number of problems so far that the hash holds out, but that equal trained rows."""
        return len(self._on_neither_side)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`. ValueError if it belongs to other sources, or to other problems of these."""
        labels, saved = [c.source.label for c in self._cursors], [s["label"] for s in state["sources"]]
        if labels != saved:
            raise ValueError(f"tasks.sources are {labels}, but the checkpoint was written with {saved}: use the same")
        now = self._fingerprint()
        for what, was in state.get("fingerprint", {}).items():
            if now.get(what) != was:
                raise ValueError(
                    f"{what} is not what it was when the checkpoint was written ({was}; now {now.get(what)}): tasks"
                    " would be repeated or skipped. Set it back, or start a new run in another run.dir"
                )
        self._draws, self._seen = state["draws"], set(state["seen"])
        self.num_failed = state.get("num_failed", 0)  # absent in a checkpoint of an earlier version
        for cursor, source in zip(self._cursors, state["sources"], strict=True):
            cursor.epoch, cursor.position = source["epoch"], source["position"]
            # tasks.epochs may have been raised, and the curriculum changed.
            more = not cursor.source.endless and not 0 < cursor.max_epochs <= cursor.epoch
            cursor.spent = source.get("spent") == self.tasks.curriculum.model_dump()
            cursor.exhausted = cursor.spent or (source["exhausted"] and not more)

    def _fingerprint(self) -> dict[str, Any]:
        """Return JSON: the inputs of the order and the split, by the option that sets each."""
        if self._known_fingerprint is None:
            sources = {f"the data of tasks.sources.{i}": c.source for i, c in enumerate(self._cursors)}
            digests = {what: digest for what, source in sources.items() if (digest := source.fingerprint())}
            tasks = self.tasks
            settings = {"tasks.shuffle": tasks.shuffle, "tasks.eval_fraction": tasks.eval_fraction}
            self._known_fingerprint = {"run.seed": self.seed, **settings, **digests}
        return self._known_fingerprint

    def _next_of(self, cursor: _Cursor) -> Task | None:
        """Return the next problem of a source, or None."""
        failed_before, passed = self.num_failed, PassedOver()
        for tried, problem in enumerate(cursor.candidates(), start=1):
            if isinstance(problem, FailedProblem):
                self._leave_out(problem, self.num_failed - failed_before)
            elif self._take_if_wanted(problem, cursor):
                if self.curriculum is None or self.curriculum.gives(problem, passed):
                    return problem
            if tried < cursor.max_candidates:
                continue
            if self.split == "eval":
                return None
            if passed.best is None or self.curriculum is None:
                raise ValueError(_nothing_left(self, cursor, tried, self.num_failed - failed_before, self._last_failed))
            if passed.weight > 0:  # the best of a whole pass
                self.curriculum.give(passed.best)
                return passed.best
            if tried >= 2 * cursor.max_candidates:  # they include a whole pass
                label = cursor.source.label
                logger.warning(f"tasks.curriculum: no problem of {label} is given any more, all have weight 0")
                cursor.spent = True
                return None
        return None

    def _share(self, cursor: _Cursor) -> float:
        """Return the source's present sampling weight."""
        if self.split == "eval":  # sources that are never trained count like those of weight 1
            return cursor.share or 1.0
        return cursor.share * (self.curriculum.source_weight(cursor.source.label) if self.curriculum else 1.0)

    def _choose(self, active: list[tuple[_Cursor, float]]) -> _Cursor:
        """Choose a cursor by share, with draw number `_draws` of a counter-based generator."""
        bounds = list(itertools.accumulate(share for _, share in active))
        draw = key_of(f"{self.seed}/{self.split}/mix/{self._draws}") / 2**64
        self._draws += 1
        return active[min(bisect.bisect_right(bounds, draw * bounds[-1]), len(active) - 1)][0]

    def _take_if_wanted(self, problem: Task, cursor: _Cursor) -> bool:
        keys = cursor.keys(problem)
        if not self.accepts(keys, cursor.by_file):
            if self._rule.on_neither_side(keys, cursor.by_file):
                self._on_neither_side.add(keys[0])
            return False
        if self.split == "eval":
            text = key_of(problem_text(problem))
            if text in self._seen:
                return False
            self._seen.add(text)
        return True

    def _leave_out(self, failed: FailedProblem, num_before: int) -> None:
        """Count a failed problem. `num_before`: failures since the last task; ValueError at MAX_FAILED."""
        if num_before + 1 >= MAX_FAILED:
            raise ValueError(f"{failed}. So did the {num_before:,} problems before it: change tasks.sources.params")
        self.num_failed += 1
        self._last_failed = failed
        if self.num_failed <= _NAMED:
            more = "; more of them are only counted, in tasks/failed" if self.num_failed == _NAMED else ""
            logger.warning(f"{failed}: it is left out{more}")

    # Construction

    def _setups(self, rewards: RewardsConfig) -> Iterator[SourceSetup]:
        sources = self.tasks.sources
        for i, (source, label) in enumerate(zip(sources, labels_of(sources), strict=True)):
            seed = key_of(f"{self.seed}/{self.split}/source/{i}") >> 33
            held_out = self.split == "eval"
            reward = choose_reward(source, rewards, self.tasks.answer_rule, held_out=held_out)
            yield SourceSetup(
                source,
                label,
                reward.spec,
                seed,
                held_out,
                self.tasks.chat,
                chosen=reward,
                image_urls=self.tasks.allow_image_urls,
            )

    def _cursor(self, setup: SourceSetup) -> _Cursor:
        source = build_source(setup)
        same = comparison_by(setup.config.problem_key, source.same)
        if self.split == "eval":
            return _Cursor(setup, source, same, 1, self.tasks.shuffle)
        return _Cursor(setup, source, same, self.tasks.epochs, self.tasks.shuffle, setup.config.order_column)

    def _make_split(self) -> Split:
        def rows(by_file: bool, held_out: bool = False) -> Iterator[tuple[int, ...]]:
            """Yield the keys of all rows (or of the held-out files) of sources that are split by file, or by hash."""
            for cursor in self._cursors:
                if not cursor.source.endless and cursor.by_file is by_file:
                    if not by_file and cursor.source.num_problems is None:
                        continue  # streamed, because it is too large to read
                    other = by_file and held_out is not cursor.setup.held_out
                    setup = replace(cursor.setup, reward="", held_out=held_out)
                    yield from map(cursor.keys, problems_of(build_source(setup) if other else cursor.source))

        def keys(rows: Iterable[tuple[int, ...]]) -> frozenset[int]:
            return frozenset(itertools.chain.from_iterable(rows))

        rule = Split(self.tasks.eval_fraction, keys(rows(by_file=True, held_out=True)))
        # If all problems are compared by their texts, the hash puts equal ones on one side.
        by_key = any(cursor.same is not problem_text for cursor in self._cursors)
        generated = any(cursor.source.endless for cursor in self._cursors)
        if by_key and (generated or self.split == "train"):
            held_out = (row for row in rows(by_file=False) if rule.accepts(row, "eval", False))
            rule = replace(rule, held_out_keys=keys(held_out))
        if self.split == "train":
            return rule
        # Held-out rows exclude equal rows from training. A generator's problems cannot, since they cannot be
        # enumerated; and a row of a training file is not excluded because the hash holds another one out.
        by_hash = any(not cursor.by_file for cursor in self._cursors)
        kinds = [by_file for by_file, matters in ((True, by_hash), (False, by_key and generated)) if matters]
        trained = (row for kind in kinds for row in rows(by_file=kind) if rule.accepts(row, "train", kind))
        return replace(rule, trained_keys=keys(trained))


def _nothing_left(
    stream: TaskStream, cursor: _Cursor, tried: int, num_failed: int, last_failed: FailedProblem | None
) -> str:
    """Return the error of a stream without a task, after `tried` problems of a source, `num_failed` of them failed."""
    fraction, label = stream.tasks.eval_fraction, cursor.source.label
    if num_failed >= tried:
        return (
            f"tasks.sources: no problem of {label!r} can be used: all of {tried} in a row failed, the last with:"
            f" {last_failed}. Fix the source, or change tasks.sources.params"
        )
    if stream.split == "train":
        why = f"all of {tried} in a row are held out"
        if num_failed:
            why = f"of {tried} in a row {num_failed} failed, and all others are held out"
        if cursor.setup.config.names_held_out:
            config = cursor.setup.config
            named = f"eval_path = {config.eval_path!r}" if config.eval_path else f"eval_split = {config.eval_split!r}"
            return (
                f"tasks.sources: {named} has every problem of {label!r}, and held-out problems are not trained: {why}."
                " Name other rows, or leave it out and set tasks.eval_fraction"
            )
        return (
            f"tasks.eval_fraction = {fraction:g} leaves no problem of {label!r} for training: {why}. Lower it, or"
            " use a source with more distinct problems"
        )
    rows = f" but for {num}, which are rows that are trained" if (num := stream.num_on_neither_side) else ""
    return (
        f"tasks.eval_fraction = {fraction:g} holds no problem out for evaluation: none of {tried} of {label!r}"
        f" is{rows}. Raise it, use a source with more distinct problems, or set eval.num_tasks = 0"
    )


def _shares_of(sources: Sequence[tuple[SourceSetup, TaskSource]], temperature: float) -> list[float]:
    """Return the sampling weight of each source: its configured weight, times n^(1/T) of its n problems.

    T is `temperature` (tasks.mixing_temperature); 0: configured weights only. With T = 1 all problems, with large T all
    sources are equally likely: the temperature-based mixing of multilingual pretraining (Arivazhagan et al. 2019, arXiv
    1907.05019, section 4.2; mT5's alpha, arXiv 2010.11934, is 1/T). ValueError for a trained source with an unknown
    number of problems.
    """
    return [setup.config.weight * _share_of_size(setup, source, temperature) for setup, source in sources]


def _share_of_size(setup: SourceSetup, source: TaskSource, temperature: float) -> float:
    if not temperature or not setup.config.weight:
        return 1.0
    if source.num_problems is None:
        raise ValueError(
            f"tasks.mixing_temperature = {temperature:g}: how many problems {setup.label!r} has is not known, as they"
            " have no end or are streamed. Remove it, and mix by tasks.sources.weight"
        )
    return source.num_problems ** (1 / temperature)
