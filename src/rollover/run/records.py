"""What left the run, for its trackers: groups that a step trained, and those dropped since they were last told.

Owns the dropped groups that are not told yet. Never decides what leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from rollover.algorithms.credit import greedy_of
from rollover.envs.answer_text import Decode
from rollover.rollout.lifecycle import Event, EventKind
from rollover.track.token_stats import TokenStats
from rollover.track.tracker import RecordedCredit, RecordedGroup, Tracker
from rollover.trainer.batch import Batch
from rollover.types import DropReason, Group, Sample


class Records:
    """Tells `tracker`, if that wants groups. `decode(token ids)` gives an answer's text. `by_rewards`: whether a sample
    is trained with the advantages that its batch has, and not with those of a critic or a teacher alone."""

    def __init__(
        self, tracker: Tracker, decode: Decode, by_rewards: Callable[[Sample], bool] = lambda sample: True
    ) -> None:
        self.tracker, self.decode, self.wanted = tracker, decode, tracker.wants_groups
        self.by_rewards = by_rewards
        self.dropped: list[tuple[Group, DropReason]] = []

    def on_event(self, event: Event) -> None:
        """A listener of Lifecycle."""
        if event.kind is EventKind.DROP and event.reason is not None and self.wanted:
            self.dropped.append((event.group, event.reason))

    def tell(
        self,
        version: int,
        groups: list[Group],
        batch: Batch | None,
        tokens: Mapping[str, TokenStats] = MappingProxyType({}),
    ) -> None:
        """After the step that led to trainer `version`: its groups, if any, and all that was dropped until now.
        `tokens`: by rollout, what the step made of its tokens."""
        if not self.wanted:
            return
        samples = () if batch is None else [s for s in batch.samples if s.mask.any() and self.by_rewards(s)]
        advantages = {s.rollout_id: float(s.advantages[s.mask].mean(dtype=np.float64)) for s in samples}
        credits = {} if batch is None else _credits(batch) | _credits_of_greedy(batch, groups)
        records = [self._recorded(g, advantages, None, credits, tokens) for g in groups]
        records += [self._recorded(group, {}, reason, {}, {}) for group, reason in self.dropped]
        if records:
            self.tracker.on_groups(version, records)
        self.dropped.clear()  # not before: a write that fails is tried again with the checkpoint at the end of a run

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
    """Of each rollout of the batch, by its id."""
    found: dict[str, RecordedCredit] = {}
    for number, compared in ((k, c) for several in batch.credited.compared.values() for k, c in enumerate(several)):
        for trajectory in compared.trajectories:
            reward = batch.credited.shaped.of(trajectory).reward
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
    """Of the greedy rollouts of its groups: the rewards that their siblings are compared with."""
    found: dict[str, RecordedCredit] = {}
    for trajectory in greedy_of([group for group in groups if group.group_id in batch.credited.compared]):
        reward = batch.credited.shaped.of(trajectory).reward
        terms = batch.credited.shaped.terms.get(trajectory.sequence_id, {})
        credit = RecordedCredit(None, None if reward is None else reward.score, terms)
        found |= dict.fromkeys(trajectory.ids, credit)
    return found
