"""The plan beside what happened."""

from __future__ import annotations

import json
from pathlib import Path

from recorded_run import row, write_run
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.prediction import measured_figures, predict


def test_what_happened_is_the_mean_of_the_steps() -> None:
    rows = [row(step, **{"speed/generated_tokens_per_s": 20}) for step in (1, 2, 3)]
    found = measured_figures(rows)
    assert (found["step_s"], found["generate_s"], found["train_s"]) == (2, 1, 0.5)
    assert found["trained_tokens_per_s"] == 6 and found["staleness_max"] == 1 and found["staleness_mean"] is None
    assert found["dropped_share"] == 21 / 61 or abs(found["dropped_share"] - 21 / 61) < 1e-6
    assert measured_figures([]) == {} and measured_figures([{"step": 1}])["step_s"] is None


def test_a_run_that_tells_no_speeds_says_why(tmp_path: Path) -> None:
    assert "its metrics have no engine/decode_steps" in predict(IndexedRun(write_run(tmp_path)))["why"]
    (tmp_path / "config.resolved.json").write_text('{"train": {"num_steps": -1}}')
    assert "cannot be planned" in predict(IndexedRun(tmp_path))["why"]


def test_a_run_is_planned_with_its_own_lengths_and_speeds(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    config = {"rollout": {"groups_per_step": 2, "group_size": 2, "max_new_tokens": 16}, "plan": {"steps": 4}}
    (tmp_path / "config.resolved.json").write_text(json.dumps(config))
    more = {"tokens/step_generated": 16, "time/weights_s": 0.1}
    rows = [row(step, **more, **{"engine/decode_steps": 8 * step}) for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(of) + "\n" for of in rows))
    told = predict(IndexedRun(tmp_path))
    assert told["steps"] == 4 and "lengths" in told["from"]
    assert told["predicted"]["step_s"] > 0 and told["happened"]["step_s"] == 2
