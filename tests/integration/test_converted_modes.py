"""A launch script of verl is converted and trained: rollouts are generated when its program would generate them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import runs

from rollover.track.trace import TraceEvent

OPTIONS = (
    "algorithm.adv_estimator=grpo data.train_files={folder}/tasks.jsonl data.train_batch_size=3"
    " data.max_prompt_length=64 data.max_response_length=24 actor_rollout_ref.actor.ppo_mini_batch_size=3"
    " actor_rollout_ref.model.path={folder}/model actor_rollout_ref.rollout.n=3"
    " actor_rollout_ref.rollout.max_num_seqs=8 actor_rollout_ref.actor.optim.lr=1e-3 trainer.total_training_steps=5"
    " custom_reward_function.path={folder}/reward.py custom_reward_function.name=reward"
)
ASYNC = (
    " async_training.require_batches=1 async_training.trigger_parameter_sync_step=1"
    " async_training.staleness_threshold=1 rollout.total_rollout_steps=15"
)


def trained(
    folder: Path, program: str, further: str = "", num_rows: int = 400, words: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], list[TraceEvent]]:
    """The metrics of each step, and the events of the run."""
    runs.write(folder, rows=num_rows)
    (folder / "run.sh").write_text(f"python3 -m {program} {OPTIONS.format(folder=folder)}{further}\n")
    done = runs.rollover("convert", folder / "run.sh")
    assert done.returncode == 0, done.stderr
    (folder / "converted.toml").write_text(done.stdout)
    small = ["--model.dtype=float32", "--engine.kv_memory_gb=0.1", "--run.threads=1", "--track.live=plain"]
    done = runs.rollover("train", folder / "converted.toml", f"--run.dir={folder / 'run'}", *small, *words)
    assert done.returncode == 0, done.stderr
    rows = runs.json_lines(folder / "run" / "metrics.jsonl")
    return [row for row in rows if "staleness/max" in row], runs.trace(folder / "run")


def test_ppo_trains_on_rollouts_of_the_present_weights(tmp_path: Path) -> None:
    rows, _ = trained(tmp_path, "verl.trainer.main_ppo")
    assert len(rows) == 5
    assert {row["staleness/max"] for row in rows} == {0}


@pytest.mark.parametrize(
    ("program", "further"),
    [
        ("verl.experimental.one_step_off_policy.main_ppo", ""),
        ("verl.experimental.fully_async_policy.fully_async_main", ASYNC),
    ],
    ids=["one step off", "fully asynchronous"],
)
def test_generation_goes_on_while_the_policy_is_trained(tmp_path: Path, program: str, further: str) -> None:
    rows, events = trained(tmp_path, program, further)
    assert len(rows) == 5
    assert max(row["staleness/max"] for row in rows) == 1
    during, finished = False, 0
    for event in events:
        during = event.kind == "train_start" or (during and event.kind != "train_end")
        finished += during and event.kind == "finish"
    assert finished


def test_verl_kl_in_loss_and_reward_trains_with_both(tmp_path: Path) -> None:
    switches = (
        " algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.2 algorithm.kl_ctrl.type=adaptive"
        " algorithm.kl_ctrl.target_kl=1e-5 algorithm.kl_ctrl.horizon=20 actor_rollout_ref.actor.use_kl_loss=True"
        " actor_rollout_ref.actor.kl_loss_coef=0.1"
    )
    rows, _ = trained(tmp_path, "verl.trainer.main_ppo", switches)
    table = tomllib.loads((tmp_path / "converted.toml").read_text())["algorithm"]
    assert (table["kl_in"], table["kl_coef"], table["kl_reward_coef"]) == ("both", 0.1, 0.2)
    assert all(row["kl/reference"] > 0 and row["kl/in_reward"] != row["kl/reference"] for row in rows[1:])
    coefs = [row["kl/coef"] for row in rows]
    assert coefs[0] == 0.2 and len(set(coefs)) > 2, "kl_target steers the coefficient of the reward"


@pytest.mark.parametrize("drops", [True, False])
def test_verl_drops_the_rows_below_a_step_of_each_pass(tmp_path: Path, drops: bool) -> None:
    passes = " trainer.total_training_steps=20 trainer.total_epochs=2"
    words = [] if drops else ["--tasks.drop_last=false"]
    rows, _ = trained(tmp_path, "verl.trainer.main_ppo", passes, num_rows=8, words=words)
    assert [row["groups/consumed"] for row in rows] == ([3, 6, 9, 12] if drops else [3, 6, 9, 12, 15, 16])
    assert rows[-1]["tasks/dropped_last"] == (2 if drops else 0)
    groups = {r["group_id"]: (r["task_id"], r["attempt"]) for r in runs.records(tmp_path / "run")}
    assert len(set(groups.values())) == (12 if drops else 16), "no task twice in a pass"


def test_an_unknown_program_is_asked_about(tmp_path: Path) -> None:
    runs.write(tmp_path)
    (tmp_path / "run.sh").write_text(f"python3 -m mine.main_ppo {OPTIONS.format(folder=tmp_path)}\n")
    done = runs.rollover("convert", tmp_path / "run.sh")
    assert done.returncode == 2
    assert "--accept mine.main_ppo" in done.stderr


def test_rllm_script_trains_with_its_filters(tmp_path: Path) -> None:
    further = (
        " rllm/backend=verl rllm.algorithm.use_rllm=true rllm.rejection_sample.enable=True"
        " rllm.rejection_sample.filter_uniform_groups=True rllm.compact_filtering.enable=True"
        " rllm.stepwise_advantage.mode=broadcast"
    )
    rows, _ = trained(tmp_path, "verl.trainer.main_ppo", further)
    assert len(rows) == 5
    assert max(row["train/masked_rollouts"] for row in rows) > 0, "answers at the limit are masked"


def test_rllm_agent_arguments_are_asked_about(tmp_path: Path) -> None:
    runs.write(tmp_path)
    options = OPTIONS.format(folder=tmp_path) + " rllm.agent.max_steps=5 rllm.workflow.name=mine rllm.new=1"
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {options}\n")
    done = runs.rollover("convert", tmp_path / "run.sh")
    assert done.returncode == 2
    for option in ("rllm.agent.max_steps", "rllm.workflow.name", "rllm.new"):
        assert f"--accept {option}" in done.stderr
    assert "workflow.function" in done.stderr
