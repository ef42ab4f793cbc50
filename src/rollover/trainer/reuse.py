"""What is done with groups after their step: some are trained again (replay), some tasks are given again (re-roll).

    build:       groups ──▶ fresh batch ──zero-signal groups──▶ replay buffer ──▶ the batch that is trained
    after_step:  high-signal groups ──▶ replay buffer        failed groups ──▶ re-roll queue ──▶ the driver's next_task

Owns the replay buffer. Never trains, never generates: proximal log-probs of replayed samples are the trainer's, taken
anew in every step, so that the importance weights to the stored behavior log-probs are rebuilt at each use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollover.algorithms.estimator import rewards_of
from rollover.algorithms.filters import rollout_filters
from rollover.config import Config
from rollover.rollout.group_state import Arrays
from rollover.tasks.reroll import Reroll
from rollover.trainer.batch import Batch, BatchBuilder
from rollover.trainer.replay_buffer import Kept, ReplayBuffer, signal
from rollover.types import Group, Sample


class Reuse:
    """Replay and re-roll of one run, as [replay] and [reroll] say; with both off it builds batches and no more.

    ValueError where [algorithm] names a function of the user's that is not there.
    Counters, cumulative: `replayed_groups`, trained again in place of a fresh one; `replayed_tokens` of them in a loss.
    """

    def __init__(self, config: Config, reroll: Reroll) -> None:
        self.config, self.reroll = config, reroll
        self.builder = BatchBuilder(config.algorithm, rollout_filters(config.filters))
        self.buffer = ReplayBuffer(config.replay, config.run.seed)
        self.replayed_groups = 0
        self.replayed_tokens = 0

    def build(self, groups: list[Group], version: int) -> Batch:
        """The batch of the step at trainer `version`: groups without signal are replaced, as far as others are kept.

        A group has no signal if all its advantages are 0. Advantages are then taken anew over what is trained.
        ValueError, which says why, if no token is in the loss.
        """
        oldest = self.config.rollout.oldest_in_loss(version)
        batch = self.builder.build(groups, oldest)
        if len(self.buffer):
            quiet = sorted({g.group_id for g in groups} - _with_signal(batch))
            drawn = self.buffer.draw(len(quiet), version)
            if drawn:
                replaced = set(quiet[: len(drawn)])
                trained = [g for g in groups if g.group_id not in replaced] + [kept.group for kept in drawn]
                batch = self.builder.build(trained, oldest, {k.group.group_id: k.oldest_in_loss for k in drawn})
        if not batch.num_loss_tokens:
            raise ValueError(f"step {version + 1} has no token in its loss: {_why_no_loss(groups, batch, oldest)}")
        return batch

    def with_signal(self, groups: list[Group], version: int) -> list[Sample]:
        """Of some groups of the step at trainer `version` those samples that `build` will not replace.

        The advantages are the final ones where they depend on the own group alone (train.streaming_min_groups).
        """
        batch = self.builder.build(groups, self.config.rollout.oldest_in_loss(version))
        return [s for s in batch.samples if s.group_id in _with_signal(batch)]

    def after_step(self, groups: list[Group], batch: Batch, version: int) -> None:
        """The step at trainer `version` trained `batch`, which `build` made of `groups`; the trainer is one further."""
        self.replayed_groups += len(batch.replayed)
        self.replayed_tokens += sum(int(s.mask.sum()) for s in batch.samples if s.group_id in batch.replayed)
        if self.config.replay.size:
            self._keep(groups, batch, version)
        self.reroll.on_step(groups, version + 1)

    def _keep(self, groups: list[Group], batch: Batch, version: int) -> None:
        advantages: dict[int, list[float]] = {}
        for s in batch.samples:
            if s.mask.any():
                advantages.setdefault(s.group_id, []).append(float(s.advantages[s.mask][0]))
        oldest = self.config.rollout.oldest_in_loss(version)
        for group in groups:
            if group.group_id in advantages:
                trained = [r for r in group.rollouts if not r.greedy]
                rewards_NR = rewards_of(trained, self.config.algorithm, batch.masked.out_of_baseline)
                score = signal(advantages[group.group_id], rewards_NR)
                self.buffer.add(Kept(group, score, oldest))
        self.buffer.drop_stale(version + 1)

    def on_filtered(self, group: Group) -> None:
        """A filter dropped a scored group: its task may have failed, too."""
        self.reroll.look(group)

    def metrics(self) -> dict[str, float]:
        """Of what is on."""
        metrics = self.reroll.metrics()
        if self.config.replay.size:
            metrics |= {
                "tokens/replayed": self.replayed_tokens,
                "replay/replaced": self.replayed_groups,
                "replay/size": len(self.buffer),
                "replay/stale": self.buffer.stale,
                "replay/evicted": self.buffer.evicted,
            }
        return metrics

    def state_dict(self) -> tuple[dict[str, Any], Arrays]:
        """(JSON-able meta, arrays)."""
        buffer, arrays = self.buffer.state_dict()
        counters = {"replayed_groups": self.replayed_groups, "replayed_tokens": self.replayed_tokens}
        return {"buffer": buffer, "reroll": self.reroll.state_dict(), **counters}, arrays

    def load_state_dict(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray], version: int, max_prompt_tokens: int
    ) -> None:
        """Go on from a saved state, at trainer `version`. What the configuration has switched off stays empty."""
        self.replayed_groups, self.replayed_tokens = state["replayed_groups"], state["replayed_tokens"]
        if self.config.replay.size:
            self.buffer.load_state_dict(state["buffer"], arrays)
            self.buffer.drop_stale(version)
        if self.config.reroll.max_groups:
            self.reroll.load_state_dict(state["reroll"], max_prompt_tokens)


def _why_no_loss(groups: list[Group], batch: Batch, oldest: int) -> str:
    """What keeps each rollout of a batch out of its loss, and what to change."""
    masked, causes = batch.masked.out_of_loss, Counter[str]()
    for rollout in (r for g in groups for r in g.rollouts if not r.greedy):
        if rollout.reward is None or rollout.reward.missing:
            causes["have no reward (mend the reward function)"] += 1
        elif rollout.rollout_id in masked:
            causes["are masked by a filter (loosen [filters])"] += 1
        elif max(rollout.versions, default=-1) < oldest:
            causes[f"have no token of policy version {oldest} or later (raise rollout.max_staleness)"] += 1
        else:
            causes["have only tokens that were not sampled"] += 1
    return f"of {causes.total()} rollouts " + ", ".join(f"{num} {cause}" for cause, num in causes.most_common())


def _with_signal(batch: Batch) -> set[int]:
    """Ids of the groups with an advantage that is not 0."""
    return {s.group_id for s in batch.samples if s.advantages[s.mask].any()}
