"""Statistics over steps: how sure the reward of a step is, and the cells of trained rollouts in the staleness map."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recorded_run import group, recorded, write_run
from rollover.plugins.dashboard.rollout_index import RolloutIndex
from rollover.plugins.dashboard.run_data import RunData
from rollover.plugins.dashboard.run_statistics import MOST_COLUMNS, MOST_LEVELS, reward_intervals, staleness_map
from rollover.track.records import FORMATS, RolloutRecorder
from rollover.track.statistics import mean_interval
from rollover.types import DropReason, Group, Rollout


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


def test_reward_interval_counts_trained_trajectories_once(tmp_path: Path) -> None:
    """As in reward/mean: three contexts of one trajectory have one score."""

    def agents(group_id: int, good: float, judge: float) -> Group:
        of = group(group_id, [good, good, good, 0.0, judge, judge])
        places = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
        of.rollouts = [
            Rollout(
                group_id, sibling, one.task, one.segments, one.state, one.stop_reason, one.reward,
                role="judge" if trajectory else "solver", trajectory=trajectory, context=context,
            )
            for one, (sibling, trajectory, context) in zip(of.rollouts, places, strict=True)
        ]  # fmt: skip
        return of

    for form in FORMATS:
        folder = tmp_path / form
        recorder = RolloutRecorder(folder / "rollouts", formats=(form,))
        recorder.write(1, [recorded(agents(0, 1.0, 7.0)), recorded(agents(1, 0.4, 9.0))])
        roles = {"judge": {"trained": False}, "solver": {"trained": True}}
        (folder / "config.resolved.json").write_text(json.dumps({"workflow": {"roles": roles}}))
        found = RunData(folder).answer("intervals", {})
        _, (low, high) = mean_interval([0.5, 0.2])
        assert (found["low"], found["high"]) == (pytest.approx([low], abs=1e-6), pytest.approx([high], abs=1e-6))


def test_nothing_recorded_has_no_interval(tmp_path: Path) -> None:
    assert reward_intervals(RolloutIndex(tmp_path)) == {"steps": [], "low": [], "high": []}


def test_staleness_map_counts_trained_rollouts(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path)
    recorder.write(3, [recorded(group(1, [1.0, 0.0], [2])), recorded(group(2, [1.0], [0]))])
    recorder.write(4, [recorded(group(3, [1.0], [1, 3])), recorded(group(4, [1.0], [0]), DropReason.STALE)])
    told = staleness_map(RolloutIndex(tmp_path))
    assert (told["first"], told["last"], told["low"], told["high"]) == ([3, 4], [3, 4], [0, 1, 2], [0, 1, 2])
    assert told["counts"] == [[2, 0], [0, 0], [1, 1]] and told["read"] == 1


def test_staleness_map_merges_steps_and_versions(tmp_path: Path) -> None:
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
