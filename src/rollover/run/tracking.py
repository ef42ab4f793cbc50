"""Reports steps and finished groups to the trackers (track/tracker.py).

    Lifecycle ──▶ on_event ──dropped──┐
    the loop ──▶ on_step ──trained────┴──▶ RecordedGroup, row ──▶ trackers

Owns the check of each step (ledger, staleness bound), which ends the run before the step is reported, and the dropped
groups that are not reported yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rollover.algorithms.credit import greedy_of
from rollover.config import Config
from rollover.envs.chat import Decode, answer_decoder
from rollover.files import atomic_write_text
from rollover.rollout.lifecycle import Event, EventKind
from rollover.run.setup import Components, RunContext
from rollover.track.live import Progress
from rollover.track.token_stats import TokenStats
from rollover.track.tracker import RecordedCredit, RecordedGroup, Tracker
from rollover.trainer.batch import Batch
from rollover.types import DropReason, Group, Sample

TOKENIZER = "tokenizer.json"


class Tracking:
    """Reports to `tracker`; groups only if it wants them. `decode(token ids)` returns a text. `by_rewards`: whether the
    batch's advantages of a sample are used, and not only those of a critic or a teacher. `check(row)` raises for a step
    that breaks an invariant."""

    def __init__(
        self,
        tracker: Tracker,
        decode: Decode,
        by_rewards: Callable[[Sample], bool] = lambda sample: True,
        check: Callable[[Mapping[str, float]], None] = lambda row: None,
    ) -> None:
        self.tracker, self.decode, self.wanted = tracker, decode, tracker.wants_groups
        self.by_rewards, self.check = by_rewards, check
        self.dropped: list[tuple[Group, DropReason]] = []

    @classmethod
    def of_run(cls, context: RunContext, *, recorded: bool) -> Tracking:
        """Make the Tracking of a run. `recorded`: its groups are from another run, so no staleness bound applies."""
        config, components = context.config, context.components

        def by_rewards(sample: Sample) -> bool:
            return not (config.algorithm.advantage_traits.over_tokens or config.distill.replaces_for(sample.role))

        def check(row: Mapping[str, float]) -> None:
            components.lifecycle.check()
            bound = config.staleness_bound
            assert recorded or row["staleness/max"] <= bound, f"staleness {row['staleness/max']} is above {bound}"
            assert row.get("staleness/replayed_max", 0) <= config.replay.max_staleness, "replayed above its bound"

        decode = answer_decoder(components.loaded.tokenizer, config.rollout.keep_special_tokens)
        return cls(context.directory.trackers, decode, by_rewards, check)

    def on_event(self, event: Event) -> None:
        """Note a dropped group."""
        if event.kind is EventKind.DROP and event.reason is not None and self.wanted:
            self.dropped.append((event.group, event.reason))

    def on_step(
        self, row: dict[str, float], version: int, groups: list[Group], batch: Batch, tokens: Mapping[str, TokenStats]
    ) -> None:
        """Report the step that led to trainer `version` and trained `batch` of `groups`. `row`: of metrics.jsonl.

        `tokens`: statistics of the tokens of each rollout.
        """
        self.check(row)
        self.on_groups(version, groups, batch, tokens)
        self.tracker.on_step(row)

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
        samples = () if batch is None else [s for s in batch.samples if s.mask.any() and self.by_rewards(s)]
        advantages = {s.rollout_id: float(s.advantages[s.mask].mean(dtype=np.float64)) for s in samples}
        credits = {} if batch is None else _credits(batch) | _credits_of_greedy(batch, groups)
        records = [self._recorded(g, advantages, None, credits, tokens) for g in groups]
        records += [self._recorded(group, {}, reason, {}, {}) for group, reason in self.dropped]
        if records:
            self.tracker.on_groups(version, records)
        self.dropped.clear()  # after the write: one that fails is retried with the checkpoint at the end of a run

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


def write_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write tokenizer.json beside the records, to decode their tokens elsewhere. Slow tokenizers have none."""
    core, path = getattr(tokenizer, "backend_tokenizer", None), directory / TOKENIZER
    if core is not None and not path.exists():
        atomic_write_text(path, core.to_str())


def step_progress(config: Config, components: Components) -> Callable[[], Progress]:
    """Return a function that returns the progress of the current step, callable from any thread."""

    # No reference to the components or the trainer: it would keep a lost backend alive.
    lifecycle, trainer = components.lifecycle, weakref.ref(components.trainer)

    def progress() -> Progress:
        ready = sum(group.ready for group in list(lifecycle.cache.groups.values()))
        trained = (0, 0) if (of := trainer()) is None else of.computed.tokens()
        return Progress(ready, config.rollout.groups_per_step, lifecycle.ledger.generated_tokens, *trained)

    return progress
