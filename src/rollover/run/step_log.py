"""Log of training steps: the row of metrics, and a record of each group, sent to the trackers.

    the loop ──▶ StepLog.on_step ──▶ row, checked (ledger, staleness bound) ──────────┐
                      └─▶ GroupRecords ◀──dropped── Lifecycle    ──▶ RecordedGroup ──┴──▶ trackers (track/tracker.py)

A step that breaks an invariant ends the run before it is reported. Owns the counters of other components as of
the row before, the seconds that a step spends on each kind of work, and the dropped groups that are not reported yet.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from types import MappingProxyType

import numpy as np

from rollover.algorithms.credit import greedy_of
from rollover.algorithms.grouping import Grouping
from rollover.config import Config
from rollover.envs.chat import Decode, answer_decoder
from rollover.functions import custom_function, described
from rollover.rollout.lifecycle import Event, EventKind
from rollover.run.batch_metrics import (
    advantage_metrics,
    mask_metrics,
    reward_metrics,
    role_metrics,
    rollout_metrics,
    speed_metrics,
    staleness_metrics,
    turn_metrics,
    waste_metrics,
)
from rollover.run.device_use import DeviceUse, Utilization, peak_rss_bytes
from rollover.run.event_log import EventLog
from rollover.run.setup import Components, RunContext
from rollover.track.live import LiveView, Progress
from rollover.track.metrics import is_counter, is_of_engine
from rollover.track.token_stats import TokenStats
from rollover.track.tracker import RecordedCredit, RecordedGroup, Tracker
from rollover.trainer.batch import Batch
from rollover.types import DropReason, Group, Sample, copied

logger = logging.getLogger(__name__)

# Metrics that supervised examples lack: no policy samples them, no reward scores them, no cache holds them.
_OF_ROLLOUTS = (
    "reward/", "advantage/", "staleness/", "rollouts/", "groups/", "dropped/", "tasks/", "waste/", "ratio/",
    "clip_fraction", "length/truncated", "length/repetition", "tokens/generated", "tokens/trained", "tokens/dropped",
    "tokens/held", "tokens/environment", "tokens/step_generated", "tokens/step_processed", "time/generate_s",
    "time/score_s", "time/schedule_s", "watchdog/", "speed/generated",
)  # fmt: skip


class StepLog:
    """The metrics rows and group records of one run."""

    def __init__(self, context: RunContext, event_log: EventLog) -> None:
        self.config, self.components, self.restart_budget = context.config, context.components, context.restart_budget
        self.trackers, self.event_log = context.directory.trackers, event_log
        decode = answer_decoder(self.components.loaded.tokenizer, self.config.rollout.keep_special_tokens)
        self.records = GroupRecords(self.trackers, decode, self.config)
        self.trackers.of_type(LiveView).watch(_progress(self.config, self.components), self.config.train.num_steps)
        self.grouping = Grouping(self.config.workflow)
        self.custom_metrics = custom_metrics(self.config.track.metrics)
        self.utilization, self.device_use = Utilization(self.config), DeviceUse()
        self._seconds: dict[str, float] = {}
        self._counted: dict[str, float] = {}
        self._carried: dict[str, float] = {}  # counters of engine and rewards in earlier processes
        self._invalid: set[str] = set()  # keys that the engine reported with invalid values
        self._partly: set[str] = set()  # roles of groups that have advantages in part
        # Counters of engine, rewards and trackers before a restart.
        self._before = (
            {k: v for k, v in self._kept_counters().items() if is_counter(k)} if self.components.is_restart else {}
        )
        if self.components.is_restart:
            self.engine_growth()
        self._started = time.perf_counter()

    def begin(self) -> None:
        """Begin a step, the first or a repeated one: time and work before it belong to no row."""
        self._started = time.perf_counter()
        self.device_use.of_step(0.0)
        self._seconds.clear()
        self._since_last("train_flops", self.components.trainer.backend.flops)
        self._threads({})

    def restore(self, row: Mapping[str, float], *, next_is_missing: bool = False) -> None:
        """Continue after `row`, the last one of the process before ({}: no row).

        `next_is_missing`: that process generated for the next row, too; else its later work is in no row.
        """
        self._carried = {k: row[k] for k in self._counters() if k in row and is_counter(k)}
        generated = (
            row.get("tokens/generated", 0) if next_is_missing else self.components.lifecycle.ledger.generated_tokens
        )
        self._since_last("generated", generated)
        self._since_last("dropped", row.get("tokens/dropped", 0))
        self._since_last("admitted", row.get("groups/admitted", 0))
        self._since_last("rerolled", row.get("reroll/given", 0))
        self.restart_budget.total = max(self.restart_budget.total, int(row.get("train/restarts", 0)))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the seconds of a block as `name`: train, weights, checkpoint, eval or sleep."""
        started = time.perf_counter()
        try:
            with self.components.trace.span(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def on_step(
        self, groups: list[Group], batch: Batch, trained: dict[str, float], version: int, num_bytes: int
    ) -> dict[str, float]:
        """Report the step at trainer `version`, which trained `batch` of `groups`, and return its row.

        `trained`: metrics of the trainer and the producer. `num_bytes`: size of the weights that were synced.
        """
        row, trainer = self._row(groups, batch, trained, version, num_bytes), self.components.trainer
        self.components.lifecycle.check()
        bound = self.config.staleness_bound
        recorded = self.config.run.train_on_recorded  # by another run
        assert recorded or row["staleness/max"] <= bound, f"staleness {row['staleness/max']} is above {bound}"
        assert row.get("staleness/replayed_max", 0) <= self.config.replay.max_staleness, "replayed above its bound"
        if self.config.algorithm.supervised:
            row = {key: value for key, value in row.items() if not key.startswith(_OF_ROLLOUTS)}
        self.records.on_groups(trainer.policy_version, groups, batch, trainer.token_stats)
        self.trackers.on_step(row)
        return row

    def _row(
        self, groups: list[Group], batch: Batch, trained: dict[str, float], version: int, num_bytes: int
    ) -> dict[str, float]:
        components, driver = self.components, self.components.driver
        batch = replace(batch, samples=components.trainer.trained)
        ledger = components.lifecycle.metrics()
        ages = staleness_metrics(batch, version, self.components.lifetimes.ready_versions)
        reuse = components.reuse.metrics()
        if (rerolled := self._since_last("rerolled", reuse.get("reroll/given", 0))) > 0:
            logger.info(f"re-roll: {rerolled:g} failed tasks were given again, {reuse['reroll/size']:g} wait")
        clock = driver.clock
        waits = {"generate": clock.generation_s, "score": clock.scoring_s, "schedule": clock.scheduling_s}
        now = time.perf_counter()
        step_s, self._started = now - self._started, now
        work = ("train", "weights", "checkpoint", "eval", *(["sleep"] if self.config.cluster.colocate else []))
        times = {f"time/{k}_s": self._seconds.pop(k, 0.0) for k in work}
        times |= {f"time/{phase}_s": self._since_last(phase, total) for phase, total in waits.items()}
        row: dict[str, float] = {
            "step": components.trainer.policy_version,
            "policy_version": components.trainer.policy_version,
            "time": time.time(),
            **reward_metrics(groups, self.grouping),
            **rollout_metrics(groups),
            **self._turns(groups),
            **self.components.lifetimes.step_metrics(),
            **ages,
            "staleness/bound": self.config.staleness_bound,
            **trained,
            **components.trainer.seconds,
            "train/restarts": self.restart_budget.total,
            **ledger,
            **reuse,
            "tokens/step_generated": self._since_last("generated", ledger["tokens/generated"]),
            "tokens/step_trained": float(batch.num_loss_tokens),
            **mask_metrics(batch),
            **advantage_metrics(batch),
            **batch.credited.shaped.metrics,
            **role_metrics(groups, batch, self.grouping),
            **self._precomputed(batch),
            "groups/batches_drawn": self._since_last("admitted", ledger["groups/admitted"])
            / self.config.rollout.groups_per_step,
            "waste/dropped_tokens": self._since_last("dropped", ledger["tokens/dropped"]),
            "tasks/skipped_long_prompt": components.prompts.num_skipped,
            "tasks/left_out": components.prompts.num_left_out,
            "tasks/truncated_prompt": components.prompts.num_truncated,
            "tasks/dropped_last": components.prompts.num_dropped_last,
            "tasks/failed": components.prompts.stream.num_failed,
            **self._counters(),
            **times,
            "time/other_s": max(0.0, step_s - sum(times.values())),
            "time/step_s": step_s,
            **self._engine_waits(),
            **self._journal(),
            "weights/bytes": num_bytes,
            "memory/peak_rss_bytes": peak_rss_bytes(),
        }
        engine = self.engine_growth()
        train_flops = self._since_last("train_flops", components.trainer.backend.flops)
        row |= self.device_use.of_step(step_s)
        row |= self.utilization.of_step(row, train_flops, engine.get("engine/flops", 0.0))
        return row | speed_metrics(row) | waste_metrics(engine, row) | self._threads(engine)

    def _precomputed(self, batch: Batch) -> dict[str, float]:
        """Return counts with workflow.own_advantages = "auto"; log a role's first group with advantages in part."""
        if self.config.workflow.own_advantages != "auto":
            return {}
        partly = batch.credited.partly_precomputed
        for role in sorted(partly.keys() - self._partly):
            logger.warning(
                f"role {role}: {partly[role][0]}; the estimator gives all of that group's advantages, and"
                " those of every other such group (precomputed/partial_groups)"
            )
        self._partly |= partly.keys()
        partial = sum(map(len, partly.values()))
        return {
            "precomputed/groups": float(batch.credited.num_precomputed),
            "precomputed/partial_groups": float(partial),
        }

    def engine_growth(self) -> dict[str, float]:
        """Growth of the engine's counters since the last call."""
        return {key: self._since_last(key, value) for key, value in self._engine_stats().items()}

    def _engine_stats(self) -> dict[str, float]:
        """Counters and gauges of the engine. A custom engine may report invalid ones: they are logged and left out."""
        found = self.components.engine.stats()
        invalid = {key for key, value in found.items() if not is_of_engine(key, value)}
        for key in sorted(invalid - self._invalid):
            logger.warning(
                f"the engine reports {key} = {found[key]!r:.100}, which is left out of the metrics: give numbers, under"
                " names that begin with engine/"
            )
        self._invalid |= invalid
        return {key: value for key, value in found.items() if key not in invalid}

    def _threads(self, growth: Mapping[str, float]) -> dict[str, float]:
        """Mean threads of decode steps and micro-batches, weighted by time. `growth`: of the engine's counters."""
        team = self.components.trainer.team
        trained = [self._since_last(f"team/{n}", getattr(team, n)) for n in ("seconds", "thread_seconds")]
        decoded = [growth.get(f"engine/decode_{n}", 0.0) for n in ("s", "thread_s")]
        spans = {"train": trained, "engine": decoded}
        return {f"{who}/threads": of_threads / of_all for who, (of_all, of_threads) in spans.items() if of_all}

    def _engine_waits(self) -> dict[str, float]:
        """Seconds in which the engine was idle, by the component it waited for; with overlap only."""
        idle = self.components.driver.clock.idle.seconds()
        if not self.config.rollout.overlap:
            return {}
        return {
            f"wait/engine_for_{component}_s": self._since_last(f"idle/{component}", s) for component, s in idle.items()
        }

    def _turns(self, groups: list[Group]) -> dict[str, float]:
        """Metrics of turns and episodes; {} where no environment answers."""
        driver, lifecycle = self.components.driver, self.components.lifecycle
        if not driver.has_turns:
            return {}
        totals = self._of_turns()
        ended, late = (self._since_last(key, totals[key]) for key in ("episodes/ended", "episodes/timeout"))
        return {
            **turn_metrics(groups),
            "tokens/environment": lifecycle.ledger.environment_tokens,
            "rollouts/acting": len(lifecycle.cache.acting()),
            "wait/environment_s": self._since_last("environment", driver.clock.environment_s),
            **({"episodes/timeout_share": late / ended} if ended else {}),
        }

    def _journal(self) -> dict[str, float]:
        """Overhead of the journal in this step, if it is on."""
        num_bytes = self.event_log.journal.num_bytes
        if not self.event_log.is_on or not num_bytes:
            return {}
        return {"journal/time_s": self._since_last("journal", self.event_log.seconds), "journal/bytes": num_bytes}

    def _counters(self) -> dict[str, float]:
        """Counters and gauges of rewards, engine and driver; counters continue those of earlier processes."""
        driver = self.components.driver
        now = self._kept_counters() | driver.retrying_engine.stats() | driver.watchdog.stats()
        now |= self.event_log.counters() | self._of_turns()
        return {k: value + self._carried.get(k, 0.0) - self._before.get(k, 0.0) for k, value in now.items()}

    def _kept_counters(self) -> dict[str, float]:
        """Counters and gauges of components that survive the loss of the trainer's backend."""
        components = self.components
        return (
            components.rewarder.stats() | self._engine_stats() | self.trackers.stats() | components.kept.cluster.stats()
        )

    def _of_turns(self) -> dict[str, float]:
        """Counters of the environment. Where it plays episodes itself, it counts them instead of the driver."""
        driver, environment = self.components.driver, self.components.environment
        acting = driver.player.env_tasks.stats() if driver.has_turns else {}
        return acting | environment.stats()

    def _since_last(self, name: str, cumulative: float) -> float:
        """Return the growth of the cumulative number `name` since the last call."""
        before = self._counted.get(name, 0.0)
        self._counted[name] = cumulative
        return cumulative - before


def _progress(config: Config, components: Components) -> Callable[[], Progress]:
    """Return a function that returns the progress of the current step, callable from any thread."""

    # No reference to the components or the trainer: it would keep a lost backend alive.
    lifecycle, trainer = components.lifecycle, weakref.ref(components.trainer)

    def progress() -> Progress:
        ready = sum(group.ready for group in list(lifecycle.cache.groups.values()))
        trained = (0, 0) if (of := trainer()) is None else of.computed.tokens()
        return Progress(ready, config.rollout.groups_per_step, lifecycle.ledger.generated_tokens, *trained)

    return progress


class GroupRecords:
    """Reports groups to `tracker`, if it wants them. `decode(token ids)` returns a text."""

    def __init__(self, tracker: Tracker, decode: Decode, config: Config) -> None:
        self.tracker, self.decode, self.config, self.wanted = tracker, decode, config, tracker.wants_groups
        self.dropped: list[tuple[Group, DropReason]] = []

    def on_event(self, event: Event) -> None:
        """Note a dropped group."""
        if event.kind is EventKind.DROP and event.reason is not None and self.wanted:
            self.dropped.append((event.group, event.reason))

    def on_groups(
        self,
        version: int,
        groups: list[Group],
        batch: Batch | None,
        tokens: Mapping[str, TokenStats] = MappingProxyType({}),
    ) -> None:
        """Report the groups of the step that led to trainer `version`, and the groups dropped until now."""
        if not self.wanted:
            return
        samples = () if batch is None else [s for s in batch.samples if s.mask.any() and self._by_rewards(s)]
        advantages = {s.rollout_id: float(s.advantages[s.mask].mean(dtype=np.float64)) for s in samples}
        credits = {} if batch is None else _credits(batch) | _credits_of_greedy(batch, groups)
        records = [self._recorded(g, advantages, None, credits, tokens) for g in groups]
        records += [self._recorded(group, {}, reason, {}, {}) for group, reason in self.dropped]
        if records:
            self.tracker.on_groups(version, records)
        self.dropped.clear()  # after the write: one that fails is retried with the checkpoint at the end of a run

    def _by_rewards(self, sample: Sample) -> bool:
        """Return whether the batch has the sample's advantages, and not only a critic or a teacher."""
        over_tokens = self.config.algorithm.advantage_traits.over_tokens
        return not (over_tokens or self.config.distill.replaces_for(sample.role))

    def _recorded(
        self,
        group: Group,
        advantages: Mapping[str, float],
        reason: DropReason | None,
        credits: Mapping[str, RecordedCredit],
        tokens: Mapping[str, TokenStats],
    ) -> RecordedGroup:
        texts = [self.decode(r.token_ids()) for r in group.rollouts]
        ids = [r.rollout_id for r in group.rollouts]
        return RecordedGroup(
            group,
            texts,
            list(map(advantages.get, ids)),
            reason,
            list(map(credits.get, ids)),
            list(map(tokens.get, ids)),
        )


def _credits(batch: Batch) -> dict[str, RecordedCredit]:
    """Return the credit of each rollout of the batch, by its id."""
    found: dict[str, RecordedCredit] = {}
    for number, compared in ((k, c) for several in batch.credited.compared.values() for k, c in enumerate(several)):
        for trajectory in compared.trajectories:
            reward = batch.credited.shaped.apply(trajectory).reward
            penalty = None
            if batch.penalties is not None:
                of_tokens = (batch.penalties.tokens.get(r.rollout_id) for r in trajectory.rollouts)
                penalty = float(sum(x.sum(dtype=np.float64) for x in of_tokens if x is not None))
            credit = RecordedCredit(
                number,
                None if reward is None else reward.score,
                batch.credited.shaped.terms.get(trajectory.sequence_id, {}),
                penalty,
            )
            found |= dict.fromkeys(trajectory.ids, credit)
    for masked in batch.masked.rollouts:
        before = found.get(masked.rollout.rollout_id, RecordedCredit(None, None, {}))
        reward = before.reward if masked.in_baseline else None
        left_out = f"{masked.reason}: {masked.detail}"
        found[masked.rollout.rollout_id] = replace(before, reward=reward, left_out=left_out)
    return found


def _credits_of_greedy(batch: Batch, groups: Sequence[Group]) -> dict[str, RecordedCredit]:
    """Return the credit of greedy rollouts, whose rewards are the baseline of their siblings."""
    found: dict[str, RecordedCredit] = {}
    for trajectory in greedy_of([group for group in groups if group.group_id in batch.credited.compared]):
        reward = batch.credited.shaped.apply(trajectory).reward
        terms = batch.credited.shaped.terms.get(trajectory.sequence_id, {})
        credit = RecordedCredit(None, None if reward is None else reward.score, terms)
        found |= dict.fromkeys(trajectory.ids, credit)
    return found


CustomMetrics = Callable[[list[Group]], dict[str, float]]


def custom_metrics(spec: str) -> CustomMetrics:
    """Return the user's function (track.metrics), which makes keys `own/NAME` of a row from the groups of a step.

    It returns {} where `spec` is empty. ValueError where there is no such function; FunctionError where it raises or
    returns anything but numbers.
    """
    if not spec:
        return lambda groups: {}
    own = custom_function("track.metrics", spec, "a number for each name, as {'name': 1.0}")

    def metrics(groups: list[Group]) -> dict[str, float]:
        found = own([copied(group) for group in groups])
        if not isinstance(found, Mapping):
            raise own.refused(described(found))
        for name, value in found.items():
            is_name = isinstance(name, str) and name and name.isprintable()
            if not is_name or isinstance(value, bool) or not isinstance(value, Real):
                raise own.refused(f"{described(value)} for {name!r}")
        try:
            return {f"own/{name}": float(value) for name, value in found.items()}
        except OverflowError as error:
            raise own.failed(error) from error

    return metrics
