"""The journal read back without its steps: the run goes on with the weights of the checkpoint, at its version S.

A token that was sampled by a lost version v > S gets the version 2 S - v: it is v - S updates away from the
checkpoint, and those were lost, so at trainer version t there are (v - S) + (t - S) updates between the two policies.
That is its staleness then (docs/staleness.md). Groups that lost steps had trained are READY again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollover.run.journal.replay import Replay
from rollover.staleness import beyond_bound, expired, rolled_back
from rollover.types import DropReason, Segment


class RollBack(Replay):
    """A replay that does not train the steps of the journal again. `train(groups, version)` is told of them instead."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.version = self.parts.trainer.policy_version
        self.of_lost_versions: set[int] = set()  # ids of groups with such tokens
        self.of_lost_steps: set[int] = set()  # ids of the groups that they trained

    def give_up(self, bound: int, *, needs_weights: bool) -> int:
        """Drop what cannot be trained within this bound of staleness; returns how many groups. After `end`.

        `needs_weights`: nor what has tokens of lost versions, since the trainer needs the weights that sampled them.
        """
        cache, config = self.lifecycle.cache, self.lifecycle.config
        if not config.finish_first and bound == config.max_staleness:  # every step sees to the bound by itself
            doomed = set(expired(cache.groups.values(), self.version, bound, masks=config.masks))
        else:
            doomed = set(beyond_bound(cache.groups.values(), self.version, bound, config.groups_per_step))
        if needs_weights:
            doomed |= self.of_lost_versions & cache.groups.keys()
        for group_id in sorted(doomed):
            self.lifecycle.drop(group_id, DropReason.ROLLED_BACK)
        return len(doomed)

    def _pieces(self, meta: dict[str, Any], data: bytes) -> list[Segment]:
        pieces = super()._pieces(meta, data)
        if any(piece.policy_version > self.version for piece in pieces):
            self.of_lost_versions.add(self._rollout(meta).group_id)
        return [replace(p, policy_version=rolled_back(p.policy_version, self.version)) for p in pieces]

    def _admit(self, meta: dict[str, Any], data: bytes) -> None:
        super()._admit(meta | {"version": min(meta["version"], self.version)}, data)

    def _run(self, meta: dict[str, Any], data: bytes) -> None:
        super()._run(meta | {"version": min(meta["version"], self.version)}, data)

    def _consume(self, meta: dict[str, Any], data: bytes) -> None:
        self.taken[meta["group"]] = self._group(meta)

    def _give_back(self, meta: dict[str, Any], data: bytes) -> None:
        del self.taken[meta["group"]]

    def _return_taken(self) -> None:
        self.taken.clear()

    def _step(self, meta: dict[str, Any], data: bytes) -> None:
        self.of_lost_steps |= self.taken.keys()
        super()._step(meta, data)
        self.untold = self.unpublished = False  # there will be no row of it, and its weights are lost

    def _row(self, meta: dict[str, Any], data: bytes) -> None:
        """The row of a lost step is cut off, with all else that was written of it."""

    def _on_published(self, meta: dict[str, Any], data: bytes) -> None:
        """The weights of a lost step are gone."""
