"""[filters] in whole runs: dynamic sampling fills every step, masks leave the loss, and a hopeless run ends."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import runs

from rollover.cli import main

FIRST_IS_A_DIGIT = '''
def reward(prompts, completions, **columns):
    """1 for an answer that begins with a digit, a tenth at first: two thirds of the groups of four agree."""
    return [float(text[:1].isdigit()) for text in completions]

def without_tens(group):
    return "a tenth task" if group.group_id % 10 == 0 else None
'''
ALL_ALIKE = "def reward(prompts, completions, **columns): return [0.25 for _ in completions]\n"
MODES = {
    "sync": {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 0},
    "partial": {"interrupt": "when_enough", "in_flight_groups": 8, "max_staleness": 2},
    "fully async": {"overlap": True, "interrupt": "on_weight_update", "in_flight_groups": 9, "max_staleness": 2},
}


def recipe(
    folder: Path, filters: dict[str, Any], rollout: dict[str, Any], reward: str = FIRST_IS_A_DIGIT, steps: int = 4
) -> Path:
    file = runs.write(
        folder,
        steps=steps,
        rollout={"group_size": 4, "max_new_tokens": 16, **rollout},
        algorithm={"preset": "dapo"},
        filters=filters,
        checkpoint={"every_steps": 1, "keep": 2, "save_final_model": False},
    )
    (folder / "reward.py").write_text(reward)
    return file


def rows_of(folder: Path) -> list[dict[str, float]]:
    rows = runs.json_lines(folder / "run" / "metrics.jsonl")
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["groups/admitted"] == row["groups/consumed"] + row["groups/dropped"] + row["groups/held"]
    return rows


def scores_by_outcome(folder: Path) -> dict[str, list[list[float]]]:
    """Outcome -> the scores of each group that ended so."""
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for record in runs.records(folder / "run"):
        groups[record["outcome"], record["group_id"]].append(record["score"])
    out: dict[str, list[list[float]]] = defaultdict(list)
    for (outcome, _), scores in groups.items():
        out[outcome].append(scores)
    return out


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_dynamic_sampling_trains_full_steps_of_groups_with_a_signal(tmp_path: Path, mode: dict[str, Any]) -> None:
    assert main(["train", str(recipe(tmp_path, {"zero_variance": True}, mode))]) == 0
    rows = rows_of(tmp_path)
    assert [row["groups/consumed"] for row in rows] == [3, 6, 9, 12]
    assert all(row["groups/zero_variance"] == 0 and row["grad_norm"] > 0 for row in rows)
    assert all(row["train/zero_advantage_tokens"] == 0 for row in rows)
    last, groups = rows[-1], scores_by_outcome(tmp_path)
    assert last["filtered/zero_variance/groups"] == last["dropped/filtered/groups"] > 0
    assert len(groups["trained"]) == 12 and all(len(set(scores)) == 2 for scores in groups["trained"])
    filtered = groups["dropped:filtered"]
    assert all(len(set(scores)) == 1 for scores in filtered)
    # What is generated beside the last step may be filtered after its row was written.
    after = len(filtered) - last["dropped/filtered/groups"]
    assert after >= 0 if mode.get("overlap") else after == 0


def test_without_it_most_groups_teach_nothing(tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    assert main(["train", str(recipe(tmp_path, {}, MODES["partial"]))]) == 0
    rows = rows_of(tmp_path)
    assert sum(row["groups/zero_variance"] for row in rows) > 0 and rows[-1]["dropped/filtered/groups"] == 0
    assert "filtered/zero_variance/groups" not in rows[-1]


def test_each_filter_has_its_counter_and_the_users_own_is_asked(tmp_path: Path) -> None:
    own = f"{tmp_path / 'reward.py'}:without_tens"
    filters = {"pass_rate_above": 0.0, "pass_rate_below": 0.9, "custom": own}
    assert main(["train", str(recipe(tmp_path, filters, MODES["partial"]))]) == 0
    last = rows_of(tmp_path)[-1]
    counts = {name: last.get(f"filtered/{name}/groups", 0) for name in ("pass_rate", "custom")}
    assert counts["pass_rate"] > 0 and sum(counts.values()) == last["dropped/filtered/groups"]
    trained = {r["group_id"] for r in runs.records(tmp_path / "run") if r["outcome"] == "trained"}
    assert not any(i % 10 == 0 for i in trained)


def test_tasks_of_filtered_groups_are_given_again(tmp_path: Path) -> None:
    """Every failed group is filtered, so that none of them is trained."""
    file = recipe(tmp_path, {"zero_variance": True}, MODES["partial"], steps=6)
    assert main(["train", str(file), "--reroll.max_groups", "2", "--reroll.start_fraction", "0.2"]) == 0
    assert rows_of(tmp_path)[-1]["reroll/given"] > 0
    attempts = {r["task_id"] for r in runs.records(tmp_path / "run") if r["attempt"] >= 1_000_000}
    assert attempts <= {r["task_id"] for r in runs.records(tmp_path / "run") if r["outcome"] == "dropped:filtered"}


def test_a_run_of_which_nothing_is_left_ends_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filters = {"zero_variance": True, "give_up_after_steps": 8}
    file = recipe(tmp_path, filters, MODES["partial"])
    assert main(["train", str(file), "--train.num_steps", "2"]) == 0
    (tmp_path / "reward.py").write_text(ALL_ALIKE)
    assert main(["train", str(file), "--resume"]) == 2
    said = capsys.readouterr().err
    assert "filters: each of the last 24 scored groups was dropped" in said and "0.25, 0.25, 0.25, 0.25" in said
    before = rows_of(tmp_path)
    (tmp_path / "reward.py").write_text(FIRST_IS_A_DIGIT + "# works again\n")
    assert main(["train", str(file), "--resume"]) == 0
    rows = rows_of(tmp_path)
    assert rows[: len(before)] == before and [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["dropped/filtered/groups"] >= before[-1]["dropped/filtered/groups"] + 24


@pytest.mark.parametrize("mode", ["sync", "fully async"])
def test_filters_that_give_up_before_the_first_step_leave_the_answers_and_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    file = recipe(tmp_path, {"zero_variance": True, "give_up_after_steps": 2}, MODES[mode], reward=ALL_ALIKE)
    assert main(["train", str(file)]) == 2
    said = capsys.readouterr().err
    assert "filters: each of the last 6 scored groups was dropped" in said
    assert "go on with --resume. The answers are in rollouts/" in said
    left = runs.records(tmp_path / "run")
    assert {r["outcome"] for r in left} == {"dropped:filtered"} and len(left) >= 24
    assert all(r["score"] == 0.25 and isinstance(r["completion"], str) for r in left)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000"]
    (tmp_path / "reward.py").write_text(FIRST_IS_A_DIGIT)
    assert main(["train", str(file), "--resume", "--filters.give_up_after_steps", "40"]) == 0
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["dropped/filtered/groups"] >= len(left) // 4, "what was dropped before is counted"
    assert runs.records(tmp_path / "run")[: len(left)] == left


def test_a_shaped_score_has_the_penalty_that_the_score_has_not(tmp_path: Path) -> None:
    """All scores are alike, and groups are kept by how long their answers are."""
    filters = {"zero_variance": True, "give_up_after_steps": 20, "metric": "shaped_score"}
    file = recipe(tmp_path, filters, MODES["partial"], reward=ALL_ALIKE, steps=2)
    assert main(["train", str(file), "--rewards.overlong_buffer_tokens", "12"]) == 0
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2] and all(row["grad_norm"] > 0 for row in rows)
    for record in runs.records(tmp_path / "run"):
        assert record["score"] == 0.25
    dropped = scores_by_outcome(tmp_path).get("dropped:filtered", [])
    assert len(dropped) == rows[-1]["dropped/filtered/groups"]


def test_a_wrong_name_is_an_error_before_anything_is_generated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (
        ("--filters.custom", f"{tmp_path / 'reward.py'}:without_ten"),
        ("--algorithm.after_scoring", f"{tmp_path / 'reward.py'}:without_ten"),
        ("--algorithm.advantage", f"{tmp_path / 'reward.py'}:without_ten"),
    ):
        assert main(["train", str(recipe(tmp_path, {}, MODES["sync"])), *options]) == 2
        assert "did you mean without_tens" in capsys.readouterr().err
        assert not (tmp_path / "run" / "rollouts").exists() or not runs.records(tmp_path / "run")


def test_masked_rollouts_leave_the_loss_and_stay_in_their_groups(tmp_path: Path) -> None:
    filters = {"mask_truncated": True, "mask_overlong": True, "overlong_tokens": 12}
    assert main(["train", str(recipe(tmp_path, filters, MODES["partial"], reward=runs.REWARD))]) == 0
    rows = rows_of(tmp_path)
    trained = [r for r in runs.records(tmp_path / "run") if r["outcome"] == "trained"]
    for row in rows:
        lengths = [r["num_tokens"] for r in trained if r["step"] == row["step"]]
        masked = [n for n in lengths if n > 12]
        assert (row["train/masked_rollouts"], row["train/masked_tokens"]) == (len(masked), sum(masked))
        assert row["tokens/step_trained"] == sum(lengths) - sum(masked)
    assert sum(row["train/masked_rollouts"] for row in rows) > 0
    assert any(row["grad_norm"] > 0 for row in rows)


def test_a_converted_script_with_groups_of_one_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verl's dynamic sampling keeps a group of one: `len(...) == 1`."""
    runs.write(tmp_path)  # the toy model and its tasks
    (tmp_path / "run.sh").write_text(
        f"python3 -m verl.trainer.main_ppo data.train_files={tmp_path}/tasks.jsonl data.train_batch_size=4"
        " algorithm.adv_estimator=gae algorithm.filter_groups.enable=True algorithm.filter_groups.metric=score"
        " actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.rollout.n=1 data.max_response_length=8"
        f" actor_rollout_ref.model.path={tmp_path}/model trainer.total_training_steps=2 trainer.save_freq=-1"
        " trainer.test_freq=-1 trainer.val_before_train=False\n"
    )
    reward = ["--rewards.function", f"{tmp_path / 'reward.py'}:reward", "--tasks.chat", "false"]
    assert main(["convert", str(tmp_path / "run.sh"), *reward]) == 0, capsys.readouterr().err
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
    assert "zero_variance = true" in (tmp_path / "mine.toml").read_text()
    assert main(["train", str(tmp_path / "mine.toml"), "--run.dir", str(tmp_path / "run")]) == 0
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["groups/consumed"] for row in rows] == [4, 8] and rows[-1]["groups/dropped"] == 0
    assert all(row["grad_norm"] > 0 for row in rows)
