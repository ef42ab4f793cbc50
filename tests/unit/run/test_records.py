"""What left the run is recorded once, also where a write fails and is tried again."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollover.rollout.lifecycle import Event, EventKind
from rollover.run.records import Records
from rollover.track.recorder import RolloutRecorder, read_rollouts
from rollover.track.tracker import RecordedGroup
from rollover.types import DropReason, Group, Rollout
from unit.rollout.world import make_task


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
