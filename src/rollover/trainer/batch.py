"""The batch of a step: from finished groups to samples, with the advantages of each rollout.

    groups ──▶ batch of fresh groups ──groups without signal──▶ replay buffer ──kept groups──▶ the batch that is trained

Reads the replay buffer and never changes it (reuse.py does). Proximal log-probs of replayed samples are the trainer's,
computed in every step again, so the importance weights to the stored behavior log-probs are right at each use. Never
touches the model, and knows no estimator by name (algorithms/advantage.py does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from rollover.algorithms.credit import ALONE, UNTRAINED, Credit, Credited
from rollover.algorithms.filters import Masked, RolloutFilter, mask_rollouts, rollout_filters
from rollover.algorithms.shaping import Shaping
from rollover.config import Config, DistillConfig
from rollover.staleness import EVERY_VERSION
from rollover.trainer.distill import TeacherPrompts
from rollover.trainer.replay_buffer import ReplayBuffer
from rollover.trainer.reward_kl import Penalties
from rollover.trajectories import place
from rollover.types import Group, Rollout, Sample, StopReason

_MASKED = {
    UNTRAINED: "are of a role that is not trained (set workflow.roles.NAME.trained = true)",
    ALONE: "have no other of their role with a reward (raise rollout.group_size)",
}


@dataclass(frozen=True)
class Batch:
    """The samples of one training step, in (group, sibling) order, and how their advantages came about.

    `replayed`: ids of replayed groups. `masked`: rollouts that filters or roles took out of the loss. `penalties`: the
    KL that was subtracted from the rewards.
    """

    samples: list[Sample]
    credited: Credited = field(default_factory=Credited)
    replayed: frozenset[int] = frozenset()
    masked: Masked = field(default_factory=Masked)
    penalties: Penalties | None = None

    @property
    def num_loss_tokens(self) -> int:
        return sum(s.num_loss_tokens for s in self.samples)


class BatchBuilder:
    """Builds the batch of each step from [algorithm], [workflow] and [filters]; an empty `buffer` replaces nothing.

    `teacher_prompts`: makes the teacher's prompts (distill.privileged); None: it reads the policy's. ValueError if
    [algorithm] names a custom function that does not exist.
    """

    def __init__(self, config: Config, buffer: ReplayBuffer, teacher_prompts: TeacherPrompts | None = None) -> None:
        self.config, self.buffer, self.teacher_prompts = config, buffer, teacher_prompts
        self.shaping = Shaping(config.rewards, config.rollout.max_new_tokens)
        self.masks = rollout_filters(config.filters)
        self.credit = Credit(config.algorithm, config.workflow, config.distill, self.shaping)

    def sampled(self, groups: list[Group], version: int) -> list[Sample]:
        """Return the samples for the KL in the reward (algorithm.kl_in), at trainer `version`."""
        return sampled(groups, self.config.rollout.oldest_in_loss(version), self.config.workflow.untrained)

    def build(self, groups: list[Group], version: int, penalties: Penalties | None = None) -> Batch:
        """Build the batch of the step at trainer `version`, and replace groups without signal by kept ones.

        `penalties`: subtracted from the rewards. A group has no signal if all its advantages are 0. Advantages are then
        computed again over the groups that are trained. ValueError, with the reasons, if no token is in the loss.
        """
        self._check_roles(groups, version)
        oldest = self.config.rollout.oldest_in_loss(version)
        batch = make_batch(groups, self.credit, self.masks, oldest, penalties=penalties, version=version)
        if len(self.buffer):
            without = sorted({g.group_id for g in groups} - _with_signal(batch))
            drawn = self.buffer.draw(len(without), version)
            if drawn:
                replaced = set(without[: len(drawn)])
                trained = [g for g in groups if g.group_id not in replaced] + [kept.group for kept in drawn]
                again = {k.group.group_id: k.oldest_in_loss for k in drawn}
                batch = make_batch(trained, self.credit, self.masks, oldest, again, version=version)
        if not batch.num_loss_tokens:
            why = _empty_loss_reason(groups, batch, oldest, self.config.distill)
            raise ValueError(f"step {version + 1} has no token in its loss: {why}")
        return replace(batch, samples=self._for_teacher(groups, batch.samples))

    def _check_roles(self, groups: Iterable[Group], version: int) -> None:
        """Raise ValueError if no trajectory of the first step has a configured role: it is misspelt."""
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
        """Return the samples of some groups of a step that `build` will not replace.

        Their advantages are final if they depend on the own group alone (train.streaming_min_groups). A teacher gives
        every group a signal.
        """
        oldest = self.config.rollout.oldest_in_loss(version)
        batch = make_batch(groups, self.credit, self.masks, oldest, version=version)
        if self.config.distill.teacher:
            return self._for_teacher(groups, [s for s in batch.samples if s.mask.any()])
        with_signal = _with_signal(batch)
        return [s for s in batch.samples if s.group_id in with_signal]

    def _for_teacher(self, groups: Iterable[Group], samples: list[Sample]) -> list[Sample]:
        """Return the samples, with the teacher's prompts where a teacher scores them."""
        if self.teacher_prompts is None:
            return samples
        taught = [s for s in samples if self.config.distill.teaches(s.role)]
        prompted = {s.rollout_id: s for s in self.teacher_prompts.for_samples(groups, taught)}
        return [prompted.get(s.rollout_id, s) for s in samples]


def make_batch(
    groups: list[Group],
    credit: Credit,
    masks: Sequence[RolloutFilter] = (),
    oldest_version: int = EVERY_VERSION,
    replayed: Mapping[int, int] = MappingProxyType({}),
    penalties: Penalties | None = None,
    version: int = 0,
) -> Batch:
    """Make one Sample per rollout that has a token, in group-id and sibling order, with the advantages of `credit`.

    Baselines are taken over all trajectories of a TrajectoryGroup that have a reward, unless `masks` excludes them.
    With a teacher (distill.mix) advantages are 0 until the step, and a rollout without a reward is in the loss. Tokens
    sampled before policy version `oldest_version` are context only. `replayed`: id of each replayed group -> the
    `oldest_version` of the step that trained it first, which still holds. `penalties`: subtracted from the rewards of
    the estimators. `version`: the trainer's.
    """
    groups = sorted(groups, key=lambda g: g.group_id)
    rollouts = _sampled(groups)
    masked = mask_rollouts(groups, masks)
    oldest = {g.group_id: replayed.get(g.group_id, oldest_version) for g in groups}
    of_tokens = {} if penalties is None else penalties.tokens
    credited = credit(groups, oldest, masked.out_of_baseline, of_tokens, version, replayed)
    known = {m.rollout.rollout_id for m in masked.rollouts}
    masked = Masked([*masked.rollouts, *(m for m in credited.left_out if m.rollout.rollout_id not in known)])
    out_of_loss = masked.out_of_loss | credited.missing
    prompts = {id(r.prompt): _prompt_ids(r) for r in rollouts}
    samples = [
        _sample(
            r,
            prompts[id(r.prompt)],
            credited.advantages.get(r.rollout_id, 0.0),
            oldest[r.group_id],
            in_loss=r.rollout_id not in out_of_loss,
            sequence_id=credited.sequences.get(r.rollout_id, r.rollout_id),
        )
        for r in rollouts
        if r.num_tokens
    ]
    if credit.algorithm.advantage_traits.over_tokens:
        samples = [
            s.with_streams(advantages=_token_rewards(s.advantages, s.mask, of_tokens.get(s.rollout_id)))
            for s in samples
        ]
    return Batch(samples, credited, frozenset(replayed), masked, penalties)


def sampled(groups: list[Group], oldest_version: int = EVERY_VERSION, untrained: Collection[str] = ()) -> list[Sample]:
    """Return every rollout with a token as a sample, with all sampled tokens since `oldest_version` in its loss.

    Masked rollouts are included, as baselines may use their rewards; `untrained` roles are not. Ordered as in
    `make_batch`.
    """
    samples = [
        _sample(r, _prompt_ids(r), 0.0, oldest_version, in_loss=True, sequence_id=r.rollout_id)
        for r in _sampled(groups)
        if r.num_tokens and r.role not in untrained
    ]
    return [s for s in samples if s.mask.any()]


# Private


def _sampled(groups: list[Group]) -> list[Rollout]:
    """Return all rollouts but greedy ones, in group-id and sibling order."""
    ordered = sorted(groups, key=lambda g: g.group_id)
    return [r for g in ordered for r in sorted(g.rollouts, key=place) if not r.greedy]


def _sample(
    rollout: Rollout,
    prompt_ids: np.ndarray,
    advantages: float | np.ndarray,
    oldest_version: int,
    *,
    in_loss: bool,
    sequence_id: str,
) -> Sample:
    """Make the sample of a rollout. `advantages`: one for all tokens, or [n]."""
    segments = rollout.segments
    lengths = [len(s) for s in segments]
    sampled = [s.trainable and s.policy_version >= oldest_version for s in segments]
    # All sampled segments of a run share one temperature.
    temperature = max((s.sampling.temperature for s in segments if s.trainable), default=1.0)
    advantages_n = np.empty(sum(lengths), dtype=np.float32)
    advantages_n[:] = advantages
    return Sample(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        prompt_ids=prompt_ids,
        token_ids=_as_int32(f"rollout {rollout.rollout_id}", np.concatenate([s.token_ids for s in segments])),
        mask=np.repeat(sampled, lengths).astype(bool) & in_loss,
        streams={
            "behavior_logprobs": np.concatenate([s.logprobs for s in segments]).astype(np.float32),
            "versions": np.repeat([s.policy_version for s in segments], lengths).astype(np.int32),
            "advantages": advantages_n,
        },
        temperature=temperature,
        sequence_id=sequence_id,
        role=rollout.role,
        truncated=rollout.stop_reason is StopReason.LENGTH,
        media=rollout.prompt.media + rollout.later_media,
    )


def _prompt_ids(rollout: Rollout) -> np.ndarray:
    return _as_int32(f"the prompt of rollout {rollout.rollout_id}", np.asarray(rollout.prompt.ids))


def _as_int32(whose: str, token_ids: np.ndarray) -> np.ndarray:
    """Return the token ids as int32. ValueError for one that does not fit: truncated, it is another token's id."""
    narrow = token_ids.astype(np.int32)
    if not np.array_equal(narrow, token_ids):
        wrong = token_ids[narrow != token_ids][0]
        raise ValueError(f"{whose}: {wrong} is not a token id (a 32-bit integer)")
    return narrow


def _token_rewards(values: np.ndarray, mask: np.ndarray, penalty: np.ndarray | None) -> np.ndarray:
    """Put the reward at the last loss token, and subtract each loss token's penalty; 0 elsewhere."""
    out = np.zeros_like(values)
    places = np.flatnonzero(mask)
    if len(places):
        out[places[-1]] = values[places[-1]]
        if penalty is not None:
            out[places] -= penalty[places]
    return out


def _with_signal(batch: Batch) -> set[int]:
    """Return the ids of the groups with an advantage that is not 0."""
    return {s.group_id for s in batch.samples if s.advantages[s.mask].any()}


def _empty_loss_reason(groups: list[Group], batch: Batch, oldest: int, distill: DistillConfig) -> str:
    """Describe why no rollout of a batch is in its loss, and what to change."""
    masked = {m.rollout.rollout_id: m.reason for m in batch.masked.rollouts}
    causes = Counter[str]()
    for rollout in (r for g in groups for r in g.rollouts if not r.greedy):
        if not distill.replaces_for(rollout.role) and (rollout.reward is None or rollout.reward.missing):
            causes["have no reward (fix the reward function)"] += 1
        elif reason := masked.get(rollout.rollout_id):
            causes[_MASKED.get(reason, "are masked by a filter (loosen [filters])")] += 1
        elif max(rollout.versions, default=-1) < oldest:
            causes[f"have no token of policy version {oldest} or later (raise rollout.max_staleness)"] += 1
        else:
            causes["have only tokens that were not sampled"] += 1
    return f"of {causes.total()} rollouts " + ", ".join(f"{num} {cause}" for cause, num in causes.most_common())
