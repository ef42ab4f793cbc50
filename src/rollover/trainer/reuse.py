"""Reuse of groups after their step: replay, re-roll of failed tasks, and pass rates for the curriculum.

    after_step:  groups of high signal ──▶ replay buffer      failed groups ──▶ re-roll queue ──▶ the driver's next_task
                 pass rates ──▶ curriculum ──▶ the task stream

Owns the replay buffer and the counts of replayed groups. Never builds a batch (batch.py does), never generates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollover.algorithms.advantage import rewards_of
from rollover.algorithms.filters import pass_rate_of
from rollover.algorithms.grouping import Grouping
from rollover.algorithms.shaping import metric_of
from rollover.config import Config
from rollover.rewards.built_in import score_names
from rollover.rollout.cache import Arrays
from rollover.rollout.lifecycle import Event
from rollover.tasks.curriculum import Curriculum
from rollover.tasks.reroll import Reroll
from rollover.trainer.batch import Batch
from rollover.trainer.replay_buffer import KeptGroup, ReplayBuffer, signal
from rollover.trajectories import TrajectoryGroup
from rollover.types import DropReason, Group, Reward


class Reuse:
    """Replay, re-roll and curriculum of one run, as [replay], [reroll] and [tasks.curriculum] configure.

    Counters, cumulative: `replayed_groups`, trained again instead of a fresh one; `replayed_tokens`, their loss tokens.
    """

    def __init__(self, config: Config, reroll: Reroll, curriculum: Curriculum | None = None) -> None:
        self.config, self.reroll, self.curriculum = config, reroll, curriculum
        self.buffer = ReplayBuffer(config.replay, config.run.seed)
        self.replayed_groups = 0
        self.replayed_tokens = 0

    def after_step(self, groups: list[Group], batch: Batch, version: int) -> None:
        """Record that the step at trainer `version` trained `batch`, which was built of `groups`.

        The trainer is at the next version now.
        """
        self.replayed_groups += len(batch.replayed)
        self.replayed_tokens += sum(int(s.mask.sum()) for s in batch.samples if s.group_id in batch.replayed)
        if self.config.replay.size:
            self._keep(groups, batch, version)
        self._on_groups(groups, version)

    def on_lost_step(self, groups: list[Group], version: int) -> None:
        """Record a lost step, whose groups still determine the next tasks."""
        self._on_groups(groups, version)

    def on_roll_back(self, version: int, requeued: set[int]) -> None:
        """Go back to `version`. `requeued`: ids of groups of lost steps, which are trained again."""
        self.reroll.on_roll_back(version, requeued)
        if self.curriculum is not None:
            self.curriculum.on_roll_back(requeued)

    def on_event(self, event: Event) -> None:
        """Handle a Lifecycle event: a filtered group may have failed, too, and has a pass rate."""
        if event.reason is DropReason.FILTERED:
            self.reroll.look(event.group)
            self._update_curriculum(event.group)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the enabled parts."""
        metrics = self.reroll.metrics()
        if self.curriculum is not None:
            metrics |= self.curriculum.metrics()
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
        """Return (JSON values, arrays)."""
        buffer, arrays = self.buffer.state_dict()
        counters = {"replayed_groups": self.replayed_groups, "replayed_tokens": self.replayed_tokens}
        state = {"buffer": buffer, "reroll": self.reroll.state_dict(), **counters}
        if self.curriculum is not None:
            state["curriculum"] = self.curriculum.state_dict()
        return state, arrays

    def load_state_dict(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray], version: int, max_prompt_tokens: int
    ) -> None:
        """Restore a state at trainer `version`. Disabled parts stay empty."""
        self.replayed_groups, self.replayed_tokens = state["replayed_groups"], state["replayed_tokens"]
        if self.config.replay.size:
            self.buffer.load_state_dict(state["buffer"], arrays)
            self.buffer.drop_stale(version)
        if self.config.reroll.max_groups:
            self.reroll.load_state_dict(state["reroll"], max_prompt_tokens)
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.load_state_dict(state["curriculum"])

    # Private

    def _on_groups(self, groups: list[Group], version: int) -> None:
        """Update re-roll and curriculum with the groups of the step at trainer `version`."""
        self.reroll.on_step(groups, version + 1)
        if self.curriculum is not None:
            for group in groups:
                self._update_curriculum(group)
            self.curriculum.on_step(version + 1)

    def _update_curriculum(self, group: Group) -> None:
        if self.curriculum is not None:
            threshold, untrained = self.config.filters.pass_threshold, self.config.workflow.untrained
            rate = pass_rate_of(group, threshold=threshold, metric=metric_of(self.config), untrained=untrained)
            self.curriculum.saw(group, rate)

    def _keep(self, groups: list[Group], batch: Batch, version: int) -> None:
        """Add the groups that the step trained to the buffer, with their scores."""
        trained = {s.group_id for s in batch.samples if s.mask.any()}
        oldest = self.config.rollout.oldest_in_loss(version)
        largest: dict[str, float] = {}  # advantage of each sequence
        for s in batch.samples:
            if s.mask.any():
                of_row = float(np.abs(s.advantages[s.mask]).max())
                largest[s.sequence_id] = max(of_row, largest.get(s.sequence_id, 0.0))
        for group in groups:
            if group.group_id in trained:
                score = sum(self._signal(c, batch, largest) for c in batch.credited.compared[group.group_id])
                self.buffer.add(KeptGroup(group, score, oldest))
        self.buffer.drop_stale(version + 1)

    def _signal(self, compared: TrajectoryGroup, batch: Batch, largest: Mapping[str, float]) -> float:
        """Return the signal of one TrajectoryGroup. Precomputed advantages are a signal by themselves."""
        algorithm, workflow = self.config.algorithm, self.config.workflow
        left_out = batch.masked.out_of_baseline
        advantages = [largest[t.sequence_id] for t in compared.trajectories if t.sequence_id in largest]
        estimator = workflow.advantage_of(
            compared.trajectories[0].role, algorithm.advantage
        )  # all roles of it have one
        if workflow.credit != "broadcast" or Grouping(workflow, self.config.distill).uses_precomputed(
            compared, estimator
        ):
            return sum(advantages)
        shaped = batch.credited.shaped
        rewards = [None if t.ids & left_out else shaped.apply(t).reward for t in compared.trajectories]
        if not algorithm.reward_weights and (parts := score_names(compared.trajectories[0].named)):
            parts += sorted({term for t in compared.trajectories for term in shaped.terms.get(t.sequence_id, ())})
            parts_NR = np.array([_parts(reward, parts) for reward in rewards])
            if not np.isnan(parts_NR).all():  # the reward of an environment has no parts
                return signal(advantages, parts_NR)
        return signal(advantages, rewards_of(rewards, [t.named for t in compared.trajectories], algorithm))


def _parts(reward: Reward | None, names: Sequence[str]) -> list[float]:
    """Return the scores of these functions and shaping terms; NaN: missing, or not applicable."""
    extras = {} if reward is None or reward.score is None else reward.extras
    return [extras.get(name, math.nan) for name in names]
