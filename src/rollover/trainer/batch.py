"""From finished groups to training rows: the advantages of each rollout, and the other streams of its tokens.

Numpy arrays of a Sample are [n] over the tokens after the prompt. Never touches the model, and knows no estimator by
name (algorithms/estimator.py does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from rollover.algorithms.credit import Credit, RoleCredit
from rollover.algorithms.filters import Masked, RolloutFilter, mask_rollouts
from rollover.algorithms.shaping import Shaped, Shaping
from rollover.config import AlgorithmConfig, DistillConfig, WorkflowConfig
from rollover.staleness import EVERY_VERSION
from rollover.trainer.reward_kl import Penalties
from rollover.trajectories import TrajectoryGroup, place
from rollover.types import Group, Rollout, Sample, StopReason


@dataclass(frozen=True)
class Batch:
    """The samples of one training step, in (group, sibling) order.

    `replayed`: ids of the groups that were trained before. `masked`: the rollouts that filters or roles took out of the
    loss. `compared`: id of each group -> what its baselines were taken over. `penalties`: the KL that was taken off its
    rewards. `shaped`: the rewards that are trained before that, where they are not the scores. `roles`: how the
    advantages of each role are scaled, where the step estimates them over tokens; roles that are not in it share their
    statistics. `brought`, `partly`: as of Credited.
    """

    samples: list[Sample]
    replayed: frozenset[int] = frozenset()
    masked: Masked = field(default_factory=Masked)
    compared: Mapping[int, Sequence[TrajectoryGroup]] = field(default_factory=dict[int, Sequence[TrajectoryGroup]])
    penalties: Penalties | None = None
    shaped: Shaped = field(default_factory=Shaped)
    roles: Mapping[str, RoleCredit] = field(default_factory=dict[str, RoleCredit])
    brought: int = 0
    partly: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])

    @property
    def num_loss_tokens(self) -> int:
        return sum(s.num_loss_tokens for s in self.samples)


class BatchBuilder:
    """Makes batches as [algorithm] and [workflow] say; `masks` take single rollouts out of the loss.

    `distill`: which roles get their advantages of a teacher (distill.mix): until then they are 0, and a rollout without
    a reward is in the loss. `shaping`: makes the rewards that are trained of the scores. ValueError where these name a
    function of the user's own that does not exist.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        masks: Sequence[RolloutFilter] = (),
        workflow: WorkflowConfig | None = None,
        distill: DistillConfig | None = None,
        shaping: Shaping | None = None,
    ) -> None:
        self.algorithm, self.masks = algorithm, masks
        self.untrained = workflow.untrained if workflow else frozenset[str]()
        self._credit = Credit(algorithm, workflow or WorkflowConfig(), distill, shaping)

    def build(
        self,
        groups: list[Group],
        oldest_version: int = EVERY_VERSION,
        replayed: Mapping[int, int] = MappingProxyType({}),
        penalties: Penalties | None = None,
        version: int = 0,
    ) -> Batch:
        """One Sample per rollout that has a token, in group-id and sibling order.

        A baseline is taken over all trajectories of a TrajectoryGroup that have a reward (algorithms/credit.py), but
        for masked ones whose filter says that their rewards do not count. Tokens sampled before policy version
        `oldest_version` are context only (staleness.oldest_in_loss). `replayed`: id of each group that was trained
        before -> the `oldest_version` of the step that trained it first, which holds for it still. `penalties`: taken
        off the rewards that the estimators see. `version`: the trainer's.
        """
        groups = sorted(groups, key=lambda g: g.group_id)
        sampled = _sampled(groups)
        masked = mask_rollouts(groups, self.masks)
        oldest = {g.group_id: replayed.get(g.group_id, oldest_version) for g in groups}
        of_tokens = {} if penalties is None else penalties.tokens
        credited = self._credit(groups, oldest, masked.out_of_baseline, of_tokens, version, replayed)
        known = {m.rollout.rollout_id for m in masked.rollouts}
        masked = Masked([*masked.rollouts, *(m for m in credited.left_out if m.rollout.rollout_id not in known)])
        out_of_loss = masked.out_of_loss | credited.missing
        prompts = {id(r.prompt): _prompt_ids(r) for r in sampled}
        samples = [
            _sample(
                r,
                prompts[id(r.prompt)],
                credited.advantages.get(r.rollout_id, 0.0),
                oldest[r.group_id],
                in_loss=r.rollout_id not in out_of_loss,
                sequence_id=credited.sequences.get(r.rollout_id, r.rollout_id),
            )
            for r in sampled
            if r.num_tokens
        ]
        if self.algorithm.advantage_traits.over_tokens:
            samples = [
                s.with_streams(advantages=_token_rewards(s.advantages, s.mask, of_tokens.get(s.rollout_id)))
                for s in samples
            ]
        return Batch(
            samples,
            frozenset(replayed),
            masked,
            credited.compared,
            penalties,
            credited.shaped,
            credited.roles,
            credited.brought,
            credited.partly,
        )

    def sampled(self, groups: list[Group], oldest_version: int = EVERY_VERSION) -> list[Sample]:
        """Every rollout that has a token, with all tokens in its loss that were sampled, at `oldest_version` or later:
        those of masked ones, too, whose rewards a baseline may be taken over. In the order of `build`."""
        samples = [
            _sample(r, _prompt_ids(r), 0.0, oldest_version, in_loss=True, sequence_id=r.rollout_id)
            for r in _sampled(groups)
            if r.num_tokens and r.role not in self.untrained
        ]
        return [s for s in samples if s.mask.any()]


# Private


def _sampled(groups: list[Group]) -> list[Rollout]:
    """All rollouts but greedy ones, in group-id and sibling order."""
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
    """`advantages`: of all tokens, or [n]."""
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
        token_ids=_narrow(f"rollout {rollout.rollout_id}", np.concatenate([s.token_ids for s in segments])),
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
    return _narrow(f"the prompt of rollout {rollout.rollout_id}", np.asarray(rollout.prompt.ids))


def _narrow(whose: str, token_ids: np.ndarray) -> np.ndarray:
    """The token ids as int32. ValueError where one does not fit: truncated, it could be the id of another token."""
    narrow = token_ids.astype(np.int32)
    if not np.array_equal(narrow, token_ids):
        wrong = token_ids[narrow != token_ids][0]
        raise ValueError(f"{whose}: {wrong} is no token id: they are 32-bit integers")
    return narrow


def _token_rewards(values: np.ndarray, mask: np.ndarray, penalty: np.ndarray | None) -> np.ndarray:
    """The reward of a rollout at its last loss token, less the penalty of each loss token; 0 elsewhere."""
    out = np.zeros_like(values)
    places = np.flatnonzero(mask)
    if len(places):
        out[places[-1]] = values[places[-1]]
        if penalty is not None:
            out[places] -= penalty[places]
    return out
