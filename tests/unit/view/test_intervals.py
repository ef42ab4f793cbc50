"""How sure the reward of a step is."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorded_run import group, recorded
from rollover.reading.rollout_index import RolloutIndex
from rollover.track.recorder import RolloutRecorder
from rollover.track.statistics import mean_interval
from rollover.types import DropReason
from rollover.view.intervals import reward_intervals


def test_the_interval_is_over_groups_and_of_what_was_trained(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path)
    recorder.write(1, [recorded(group(0, [1.0, 0.0, None])), recorded(group(1, [1.0, 1.0])), recorded(group(2, [0.0]))])
    recorder.write(2, [recorded(group(3, [1.0, 0.0]))])  # of one group nobody knows how it varies
    dropped = recorded(group(6, [9.0]), DropReason.STALE)
    recorder.write(3, [recorded(group(4, [0.5])), recorded(group(5, [0.5])), dropped, recorded(group(7, [None]))])
    found = reward_intervals(RolloutIndex(tmp_path))
    _, (low, high) = mean_interval([0.5, 1.0, 0.0])
    assert found["steps"] == [1, 3]
    assert found["low"] == pytest.approx([low, 0.5], abs=1e-6) and found["high"] == pytest.approx([high, 0.5], abs=1e-6)


def test_nothing_recorded(tmp_path: Path) -> None:
    assert reward_intervals(RolloutIndex(tmp_path)) == {"steps": [], "low": [], "high": []}
