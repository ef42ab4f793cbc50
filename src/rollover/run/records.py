"""What left the run, for its trackers: groups that a step trained, and those dropped since they were last told.

Owns the dropped groups that are not told yet. Never decides what leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rollover.rollout.lifecycle import Event, EventKind
from rollover.track.tracker import RecordedGroup, Tracker
from rollover.trainer.batch import Batch
from rollover.types import DropReason, Group, Sample


class Records:
    """Tells `tracker`, if that wants groups. `decode(token ids)` gives an answer's text. `by_rewards`: whether a sample
    is trained with the advantages that its batch has, and not with those of a critic or a teacher alone."""

    def __init__(
        self, tracker: Tracker, decode: Callable[..., Any], by_rewards: Callable[[Sample], bool] = lambda sample: True
    ) -> None:
        self.tracker, self.decode, self.wanted = tracker, decode, tracker.wants_groups
        self.by_rewards = by_rewards
        self.dropped: list[tuple[Group, DropReason]] = []

    def on_event(self, event: Event) -> None:
        """For Lifecycle.on_event."""
        if event.kind is EventKind.DROP and event.reason is not None and self.wanted:
            self.dropped.append((event.group, event.reason))

    def tell(self, version: int, groups: list[Group], batch: Batch | None) -> None:
        """After the step that led to trainer `version`: its groups, if any, and all that was dropped until now."""
        if not self.wanted:
            return
        samples = () if batch is None else [s for s in batch.samples if s.mask.any() and self.by_rewards(s)]
        advantages = {s.rollout_id: float(s.advantages[s.mask].mean(dtype=np.float64)) for s in samples}
        records = [self._recorded(g, advantages, None) for g in groups]
        records += [self._recorded(group, {}, reason) for group, reason in self.dropped]
        if records:
            self.tracker.on_groups(version, records)
        self.dropped.clear()  # not before: a write that fails is tried again with the checkpoint at the end of a run

    def _recorded(self, group: Group, advantages: dict[str, float], reason: DropReason | None) -> RecordedGroup:
        texts = [self.decode(r.token_ids(), skip_special_tokens=True) for r in group.rollouts]
        return RecordedGroup(group, texts, [advantages.get(r.rollout_id) for r in group.rollouts], reason)
