"""Staleness over steps: every trained rollout is in one cell, and a long run is no more than a screen has."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recorded_run import group, recorded, write_run
from rollover.plugins.dashboard.rollout_index import RolloutIndex
from rollover.plugins.dashboard.stale import MOST_COLUMNS, MOST_LEVELS, staleness_map
from rollover.track.recorder import RolloutRecorder
from rollover.types import DropReason


def test_each_trained_rollout_is_in_the_cell_of_its_step_and_staleness(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path)
    recorder.write(3, [recorded(group(1, [1.0, 0.0], [2])), recorded(group(2, [1.0], [0]))])
    recorder.write(4, [recorded(group(3, [1.0], [1, 3])), recorded(group(4, [1.0], [0]), DropReason.STALE)])
    told = staleness_map(RolloutIndex(tmp_path))
    assert (told["first"], told["last"], told["low"], told["high"]) == ([3, 4], [3, 4], [0, 1, 2], [0, 1, 2])
    assert told["counts"] == [[2, 0], [0, 0], [1, 1]] and told["read"] == 1


def test_many_steps_and_versions_are_put_together_and_none_is_lost(tmp_path: Path) -> None:
    recorder, steps = RolloutRecorder(tmp_path), [*range(1, 1000, 3), 1000]
    for step in steps:
        recorder.write(step, [recorded(group(step, [1.0], [max(0, step - 1 - step % 40)]))])
    told = staleness_map(RolloutIndex(tmp_path))
    counts = np.array(told["counts"])
    assert counts.shape == (len(told["low"]), len(told["first"])) and counts.sum() == len(steps)
    assert len(told["first"]) <= MOST_COLUMNS and len(told["low"]) <= MOST_LEVELS
    assert told["first"][0] == 1 and told["last"][-1] == 1000
    assert all(a + 1 == b for a, b in zip(told["last"], told["first"][1:], strict=False))
    assert all(a + 1 == b for a, b in zip(told["high"], told["low"][1:], strict=False))


def test_nothing_recorded_is_an_empty_map(tmp_path: Path) -> None:
    assert staleness_map(RolloutIndex(tmp_path / "none"))["counts"] == []
    assert len(staleness_map(RolloutIndex(write_run(tmp_path) / "rollouts"))["first"]) == 3
