"""Episodes: all contexts of one, in their order, and which rollouts of a list belong to one of several."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorded_run import group, recorded, write_run
from rollover.plugins.dashboard.rollout_index import RolloutIndex
from rollover.plugins.dashboard.rollout_query import RolloutFilter, episode, page
from rollover.plugins.dashboard.run_data import RunData
from rollover.track.records import Format, RolloutRecorder
from rollover.types import Group, Rollout


def agents(group_id: int) -> Group:
    """Episode 0 of a solver's two contexts and a judge's one, episode 1 of one rollout."""
    of = group(group_id, [1.0, 0.5, 0.0, 1.0])
    places = [(0, 0, 0, "solver"), (0, 0, 1, "solver"), (0, 1, 0, "judge"), (1, 0, 0, "solver")]
    of.rollouts = [
        Rollout(
            group_id, sibling, one.task, one.segments, one.state, one.stop_reason, one.reward, role=role,
            trajectory=trajectory, context=context,
        )
        for one, (sibling, trajectory, context, role) in zip(of.rollouts, places, strict=True)
    ]  # fmt: skip
    return of


@pytest.mark.parametrize("of_format", ["jsonl", "parquet"])
def test_the_contexts_of_an_episode_in_order(tmp_path: Path, of_format: Format) -> None:
    folder = write_run(tmp_path, formats=(of_format,)) / "rollouts"
    RolloutRecorder(folder, formats=(of_format,)).write(4, [recorded(agents(50)), recorded(agents(51))])
    index = RolloutIndex(folder)
    told = episode(index, 4, 50, 0)
    assert (told["of"], told["step"], told["group"], told["sibling"]) == (3, 4, 50, 0)
    assert [(of["id"], of["role"], of["trajectory"], of["context"], of["score"]) for of in told["contexts"]] == [
        ("50-0", "solver", 0, 0, 1), ("50-0.0.1", "solver", 0, 1, 0.5), ("50-0.1.0", "judge", 1, 0, 0),
    ]  # fmt: skip
    assert told["contexts"][1]["answered"] == "the answer 1" and "50 + 1" in told["contexts"][0]["asked"]
    rows = page(index, RolloutFilter.from_query({"step_from": "4", "group_to": "50"}))["rows"]
    assert [(row["id"], row["contexts"]) for row in rows] == [
        ("50-0", 3), ("50-0.0.1", 3), ("50-0.1.0", 3), ("50-1", 1)
    ]  # fmt: skip
    only = page(index, RolloutFilter.from_query({"group_from": "50", "group_to": "50", "sibling_from": "1"}))
    assert [row["id"] for row in only["rows"]] == ["50-1"]


def test_what_is_asked_wrongly_is_said(tmp_path: Path) -> None:
    data = RunData(write_run(tmp_path), patience_s=0.0)
    assert data.answer("episode", {"step": "3", "group": "9", "sibling": "1"})["of"] == 1
    with pytest.raises(KeyError, match="no episode 9-7 left the run with step 3"):
        data.answer("episode", {"step": "3", "group": "9", "sibling": "7"})
    with pytest.raises(ValueError, match="give step, group and sibling"):
        data.answer("episode", {"step": "3"})
