"""The batch of a step: the groups that came, with kept groups of high signal in place of those that have none.

    groups ──▶ batch of fresh groups ──groups without signal──▶ replay buffer ──kept groups──▶ the batch that is trained

Reads the replay buffer and never changes it (reuse.py does). Proximal log-probs of replayed samples are the trainer's,
computed anew in every step, so that the importance weights to the stored behavior log-probs are right at each use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from rollover.algorithms.credit import ALONE, UNTRAINED
from rollover.algorithms.filters import rollout_filters
from rollover.algorithms.shaping import Shaping
from rollover.config import Config, DistillConfig
from rollover.trainer.batch import Batch, BatchBuilder
from rollover.trainer.replay_buffer import ReplayBuffer
from rollover.trainer.reward_kl import Penalties
from rollover.trainer.teacher import TeacherPrompts
from rollover.types import Group, Sample

_MASKED = {
    UNTRAINED: "are of a role that is not trained (set workflow.roles.NAME.trained = true)",
    ALONE: "have no other of their role with a reward (raise rollout.group_size)",
}


class StepBatchBuilder:
    """Makes the batch of each step, as [algorithm] and [filters] say; an empty `buffer` replaces nothing.

    `teacher_prompts`: give what a teacher reads in the place of a group's prompt (distill.privileged); None: it reads
    that. ValueError where [algorithm] names a function of the user's own that does not exist.
    """

    def __init__(self, config: Config, buffer: ReplayBuffer, teacher_prompts: TeacherPrompts | None = None) -> None:
        self.config, self.buffer, self.teacher_prompts = config, buffer, teacher_prompts
        self.shaping = Shaping(config.rewards, config.rollout.max_new_tokens)
        masks = rollout_filters(config.filters)
        self.builder = BatchBuilder(config.algorithm, masks, config.workflow, config.distill, self.shaping)

    def sampled(self, groups: list[Group], version: int) -> list[Sample]:
        """What the KL in the reward is taken of (algorithm.kl_in), of the groups of the step at trainer `version`."""
        return self.builder.sampled(groups, self.config.rollout.oldest_in_loss(version))

    def build(self, groups: list[Group], version: int, penalties: Penalties | None = None) -> Batch:
        """The batch of the step at trainer `version`: groups without signal are replaced, as far as others are kept.

        `penalties`: taken off the rewards. A group has no signal if all its advantages are 0. Advantages are then
        computed again over the groups that are trained. ValueError, which says why, if no token is in the loss.
        """
        self._check_roles(groups, version)
        oldest = self.config.rollout.oldest_in_loss(version)
        batch = self.builder.build(groups, oldest, penalties=penalties, version=version)
        if len(self.buffer):
            without = sorted({g.group_id for g in groups} - _with_signal(batch))
            drawn = self.buffer.draw(len(without), version)
            if drawn:
                replaced = set(without[: len(drawn)])
                trained = [g for g in groups if g.group_id not in replaced] + [kept.group for kept in drawn]
                again = {k.group.group_id: k.oldest_in_loss for k in drawn}
                batch = self.builder.build(trained, oldest, again, version=version)
        if not batch.num_loss_tokens:
            why = _why_no_loss(groups, batch, oldest, self.config.distill)
            raise ValueError(f"step {version + 1} has no token in its loss: {why}")
        return replace(batch, samples=self._for_teacher(groups, batch.samples))

    def _check_roles(self, groups: Iterable[Group], version: int) -> None:
        """ValueError where a role that is configured is that of no trajectory of the first step: it is misspelt."""
        if version:
            return
        found = {r.role for g in groups for r in g.rollouts}
        if missing := self.config.workflow.roles.keys() - found:
            raise ValueError(
                f"workflow.roles.{min(missing)}: no trajectory of the first step has this role, they have"
                f" {', '.join(sorted(found))}. Give one trajectory the role, or remove [workflow.roles.{min(missing)}]"
            )
        if missing := set(self.config.distill.roles) - found:
            raise ValueError(
                f'distill.roles: no trajectory of the first step has the role "{min(missing)}", they have'
                f" {', '.join(sorted(found))}. Name one of these"
            )

    def with_signal(self, groups: list[Group], version: int) -> list[Sample]:
        """Those samples of some groups of the step at trainer `version` that `build` will not replace.

        Their advantages are the final ones where they depend on the own group alone (train.streaming_min_groups). A
        teacher has a signal for every group.
        """
        batch = self.builder.build(groups, self.config.rollout.oldest_in_loss(version), version=version)
        if self.config.distill.teacher:
            return self._for_teacher(groups, [s for s in batch.samples if s.mask.any()])
        with_signal = _with_signal(batch)
        return [s for s in batch.samples if s.group_id in with_signal]

    def _for_teacher(self, groups: Iterable[Group], samples: list[Sample]) -> list[Sample]:
        """The samples, those that a teacher scores with the prompts that it reads."""
        if self.teacher_prompts is None:
            return samples
        taught = [s for s in samples if self.config.distill.teaches(s.role)]
        told = {s.rollout_id: s for s in self.teacher_prompts.for_samples(groups, taught)}
        return [told.get(s.rollout_id, s) for s in samples]


def _with_signal(batch: Batch) -> set[int]:
    """Ids of the groups with an advantage that is not 0."""
    return {s.group_id for s in batch.samples if s.advantages[s.mask].any()}


def _why_no_loss(groups: list[Group], batch: Batch, oldest: int, distill: DistillConfig) -> str:
    """What keeps each rollout of a batch out of its loss, and what to change."""
    masked = {m.rollout.rollout_id: m.reason for m in batch.masked.rollouts}
    causes = Counter[str]()
    for rollout in (r for g in groups for r in g.rollouts if not r.greedy):
        if not distill.replaces_for(rollout.role) and (rollout.reward is None or rollout.reward.missing):
            causes["have no reward (mend the reward function)"] += 1
        elif reason := masked.get(rollout.rollout_id):
            causes[_MASKED.get(reason, "are masked by a filter (loosen [filters])")] += 1
        elif max(rollout.versions, default=-1) < oldest:
            causes[f"have no token of policy version {oldest} or later (raise rollout.max_staleness)"] += 1
        else:
            causes["have only tokens that were not sampled"] += 1
    return f"of {causes.total()} rollouts " + ", ".join(f"{num} {cause}" for cause, num in causes.most_common())
