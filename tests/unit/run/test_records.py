"""What left the run is recorded once, also where a write fails and is tried again."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollover.config import AlgorithmConfig, WorkflowConfig
from rollover.rollout.lifecycle import Event, EventKind
from rollover.run.records import Records
from rollover.track.recorded import read_records, read_rollouts
from rollover.track.recorder import RolloutRecorder
from rollover.track.tracker import RecordedGroup
from rollover.trainer.batch import BatchBuilder
from rollover.types import DropReason, Group, Reward, Rollout, StopReason
from unit.rollout.world import make_segment, make_task


class FullOnce(RolloutRecorder):
    full = True

    def write(self, step: int, groups: Sequence[RecordedGroup]) -> Path:
        if self.full:
            self.full = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(step, groups)


def test_a_dropped_group_is_recorded_after_a_write_that_failed(tmp_path: Path) -> None:
    """A step's, say: the checkpoint before the run ends has room again."""

    def decode(ids: Any, **options: Any) -> str:
        return ""

    records = Records(FullOnce(tmp_path), decode)
    group = Group(0, make_task(0), (1, 2), [Rollout(0, 0, make_task(0))])
    records.on_event(Event(EventKind.DROP, group, reason=DropReason.STALE))
    with pytest.raises(OSError, match="No space left"):
        records.tell(1, [], None)
    records.tell(1, [], None)
    records.tell(1, [], None)
    assert [[g.group_id for g in groups] for groups in read_rollouts(tmp_path, include_dropped=True)] == [[0]]


def test_the_advantage_of_a_record_is_that_of_its_tokens_in_the_loss(tmp_path: Path) -> None:
    """By turns the returns are 2 and 1, and 1 and 1: less their mean 1.25 the two tokens of the first turn of the first
    rollout have 0.75, and the three of its second turn -0.25. What is out of the loss, or a critic's, has none."""

    def rollout(sibling: int, turns: list[float], reward: float | None) -> Rollout:
        segments = [
            make_segment(2, 0, StopReason.EOS),
            make_segment(1, 0, StopReason.PAUSED, trainable=False),
            make_segment(3, 0, StopReason.EOS),
        ]
        scored = Reward(reward, turns=turns, error=None if reward is not None else "e")
        return Rollout(0, sibling, make_task(0), segments, stop_reason=StopReason.EOS, reward=scored)

    scores = [rollout(0, [1.0, 0.0], 1.0), rollout(1, [0.0, 0.0], 1.0), rollout(2, [], None)]
    group = Group(0, make_task(0), (1, 2), scores)
    by_turns = WorkflowConfig(credit="turn_returns")
    batch = BatchBuilder(AlgorithmConfig(advantage="dr_grpo"), workflow=by_turns).build([group])
    Records(RolloutRecorder(tmp_path / "a"), lambda ids, **options: "").tell(1, [group], batch)
    Records(RolloutRecorder(tmp_path / "b"), lambda ids, **options: "", lambda sample: False).tell(1, [group], batch)
    told = [[record["advantage"] for record in read_records(tmp_path / name)] for name in "ab"]
    assert told[0] == pytest.approx([(2 * 0.75 - 3 * 0.25) / 5, -0.25, None]) and told[1] == [None] * 3
