"""Converted configurations of other systems, trained: the modes, and scripts that were published."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import runs

from rollover.plugins.convert.conversion import convert_file
from rollover.track.trace import TraceEvent

# A launch script of verl is converted and trained: rollouts are generated when its program would generate them


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
    folder: Path, program: str, further: str = "", num_rows: int = 400
) -> tuple[list[dict[str, Any]], list[TraceEvent]]:
    """The metrics of each step, and the events of the run."""
    runs.write(folder, rows=num_rows)
    (folder / "run.sh").write_text(f"python3 -m {program} {OPTIONS.format(folder=folder)}{further}\n")
    done = runs.rollover("convert", folder / "run.sh")
    assert done.returncode == 0, done.stderr
    (folder / "converted.toml").write_text(done.stdout)
    small = ["--model.dtype=float32", "--engine.kv_memory_gb=0.1", "--run.threads=1", "--track.live=plain"]
    done = runs.rollover("train", folder / "converted.toml", f"--run.dir={folder / 'run'}", *small)
    assert done.returncode == 0, done.stderr
    rows = runs.rows(folder)
    return [row for row in rows if "staleness/max" in row], runs.trace(folder / "run")


def test_generation_goes_on_while_the_policy_is_trained(tmp_path: Path) -> None:
    rows, events = trained(tmp_path, "verl.experimental.fully_async_policy.fully_async_main", ASYNC)
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


def test_verl_drops_the_rows_below_a_step_of_each_pass(tmp_path: Path) -> None:
    passes = " trainer.total_training_steps=20 trainer.total_epochs=2"
    rows, _ = trained(tmp_path, "verl.trainer.main_ppo", passes, num_rows=8)
    assert [row["groups/consumed"] for row in rows] == [3, 6, 9, 12]
    assert rows[-1]["tasks/dropped_last"] == 2 and {row["staleness/max"] for row in rows} == {0}
    groups = {r["group_id"]: (r["task_id"], r["attempt"]) for r in runs.records(tmp_path / "run")}
    assert len(set(groups.values())) == 12, "no task twice in a pass"


# Launch files as other systems publish them, in small: converted, and trained for two steps in the mode they name


SMALL = ("--model.dtype=float32", "--engine.kv_memory_gb=0.1", "--engine.max_running=8", "--run.threads=1")

APR = """set -x
day=$(date +%Y%m%d)
project_name='partial'
exp_name="toy-pr-grpo-bs3-${{day}}"
HOME_DIR={folder}
CKPTS_DIR="${{HOME_DIR}}/checkpoints/${{project_name}}"
rollout_mode="async"
rollout_name="vllm"
if [ "$rollout_mode" = "async" ]; then
    export VLLM_USE_V1=1
    return_raw_chat="True"
fi
python3 -m recipe.partial_rollout.main_ppo \\
    +async_training.partial_rollout=True \\
    algorithm.adv_estimator=grpo \\
    algorithm.rollout_correction.rollout_is=token \\
    algorithm.rollout_correction.rollout_is_threshold=2.0 \\
    data.train_files="${{HOME_DIR}}/tasks.jsonl" \\
    data.train_batch_size=3 \\
    data.max_prompt_length=64 data.max_response_length=24 \\
    data.filter_overlong_prompts=True data.truncation='error' \\
    actor_rollout_ref.model.path="${{HOME_DIR}}/model" \\
    actor_rollout_ref.actor.optim.lr=1e-3 \\
    actor_rollout_ref.hybrid_engine=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=3 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.rollout.name="${{rollout_name}}" actor_rollout_ref.rollout.mode="${{rollout_mode}}" \\
    actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent \\
    actor_rollout_ref.rollout.n=3 \\
    custom_reward_function.path="${{HOME_DIR}}/reward.py" custom_reward_function.name=reward \\
    trainer.logger=['console'] trainer.experiment_name="${{exp_name}}" \\
    trainer.critic_warmup=0 trainer.save_freq=25 trainer.test_freq=-1 \\
    trainer.default_local_dir="${{CKPTS_DIR}}" trainer.total_training_steps=2 \\
    trainer.total_epochs=5 $@ 2>&1 | tee -a ${{HOME_DIR}}/log.txt
"""

AXOLOTL = """
base_model: {folder}/model
rl: grpo
chat_template: tokenizer_default
vllm:
  port: 8000
  gpu_memory_utilization: 0.85
  max_model_len: 112
trl:
  use_vllm: true
  use_data_producer: true
  async_prefetch: true
  prefetch_depth: 1
  vllm_sync_interval: 1
  vllm_importance_sampling_correction: true
  importance_sampling_level: token
  streaming_partial_batch: true
  streaming_min_groups: 1
  skip_zero_advantage_batches: true
  num_generations: 3
  max_completion_length: 24
  temperature: 0.7
  reward_funcs: [reward.reward]
datasets:
  - path: me/questions
    name: main
    type: reward.transform
    split: train
val_set_size: 0.0
micro_batch_size: 2
gradient_accumulation_steps: 3
max_steps: 2
learning_rate: 1.0e-3
optimizer: adamw_torch_fused
lr_scheduler: cosine
warmup_steps: 1
attn_implementation: flash_attention_2
special_tokens:
  pad_token: "<|endoftext|>"
output_dir: {folder}/out
logging_steps: 1
"""

DAPO = """#!/usr/bin/env bash
set -xeuo pipefail
adv_estimator=grpo
clip_ratio_low=0.2
clip_ratio_high=0.28
max_response_length=$((16 * 3))
enable_overlong_buffer=True
overlong_buffer_len=$((8 * 4))
overlong_penalty_factor=1.0
loss_agg_mode="token-mean"
enable_filter_groups=True
filter_groups_metric=acc
max_num_gen_batches=10
train_prompt_bsz=2
gen_prompt_bsz=$((train_prompt_bsz * 3))
n_resp_per_prompt=3
train_prompt_mini_bsz=1
RAY_DATA_HOME=${{RAY_DATA_HOME:-"{folder}"}}
MODEL_PATH=${{MODEL_PATH:-"${{RAY_DATA_HOME}}/model"}}
TRAIN_FILE=${{TRAIN_FILE:-"${{RAY_DATA_HOME}}/tasks.jsonl"}}
top_k=-1 # as vLLM has it
ray job submit --no-wait --working-dir "${{PWD}}" \\
    -- python3 -m recipe.dapo.main_dapo \\
    data.train_files="${{TRAIN_FILE}}" data.prompt_key=prompt data.truncation='left' \\
    data.max_prompt_length=64 data.max_response_length=${{max_response_length}} \\
    data.gen_batch_size=${{gen_prompt_bsz}} data.train_batch_size=${{train_prompt_bsz}} \\
    actor_rollout_ref.rollout.n=${{n_resp_per_prompt}} \\
    algorithm.adv_estimator=${{adv_estimator}} algorithm.use_kl_in_reward=False \\
    actor_rollout_ref.actor.clip_ratio_low=${{clip_ratio_low}} \\
    actor_rollout_ref.actor.clip_ratio_high=${{clip_ratio_high}} actor_rollout_ref.actor.clip_ratio_c=10.0 \\
    algorithm.filter_groups.enable=${{enable_filter_groups}} \\
    algorithm.filter_groups.max_num_gen_batches=${{max_num_gen_batches}} \\
    algorithm.filter_groups.metric=${{filter_groups_metric}} \\
    actor_rollout_ref.model.path="${{MODEL_PATH}}" \\
    actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.optim.lr_warmup_steps=1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=${{train_prompt_mini_bsz}} \\
    actor_rollout_ref.actor.loss_agg_mode=${{loss_agg_mode}} \\
    actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k="${{top_k}}" \\
    reward_model.reward_manager=dapo \\
    reward_model.overlong_buffer.enable=${{enable_overlong_buffer}} \\
    reward_model.overlong_buffer.len=${{overlong_buffer_len}} \\
    reward_model.overlong_buffer.penalty_factor=${{overlong_penalty_factor}} \\
    custom_reward_function.path={folder}/right.py custom_reward_function.name=right \\
    trainer.logger='["console"]' trainer.test_freq=5 trainer.save_freq=5 \\
    trainer.total_training_steps=2 trainer.total_epochs=1 trainer.resume_mode=auto
"""
RIGHT = '''
def right(prompts, completions, **columns):
    """Right or wrong; of most groups, all are wrong."""
    return [{"score": float(ok), "acc": ok} for ok in (sum(c.isdigit() for c in text) > 4 for text in completions)]
'''


def trained_file(
    folder: Path, name: str, text: str, answers: Sequence[str] = (), accepted: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[TraceEvent]]:
    """The metrics of each step, the recorded rollouts, and the events of the run that a file is converted to.
    `answers`: our `key=value`; `accepted`: what is left out."""
    runs.write(folder)
    path = folder / name
    path.write_text(text.format(folder=folder))
    overrides = [(key, value) for key, _, value in (answer.partition("=") for answer in answers)]
    toml, _ = convert_file(path, overrides, accepted)
    (folder / "converted.toml").write_text(toml)
    words = (f"--run.dir={folder / 'run'}", f"--checkpoint.dir={folder / 'run' / 'checkpoints'}", "--track.live=plain")
    done = runs.rollover("train", folder / "converted.toml", *words, *SMALL, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [row for row in runs.rows(folder) if "staleness/max" in row]
    assert len(rows) == 2
    return rows, runs.records(folder / "run"), runs.trace(folder / "run")


def versions(record: dict[str, Any]) -> set[int]:
    """The policy versions that sampled a rollout's tokens."""
    return {segment["policy_version"] for segment in record["segments"]}


def test_apr_resumes_what_a_step_interrupted(tmp_path: Path) -> None:
    rows, records, events = trained_file(tmp_path, "run_pr_grpo.sh", APR)
    assert {event.kind for event in events} >= {"park", "resume"}
    assert max(len(versions(record)) for record in records) == 2
    assert rows[1]["staleness/max"] == 1
    assert rows[1]["importance/max"] <= 2.0, "rollout_is_threshold"
    assert all("kl/reference" in row for row in rows)


def test_axolotl_generates_the_next_batch_while_it_trains(tmp_path: Path) -> None:
    answers = (f"tasks.sources.0.path={tmp_path}/tasks.jsonl", f"rewards.function={tmp_path}/reward.py:reward")
    rows, records, events = trained_file(tmp_path, "grpo.yaml", AXOLOTL, answers)
    assert [row["staleness/max"] for row in rows] == [0, 1]
    assert all(len(versions(record)) == 1 for record in records), "what is generated ahead has one version"
    first = next(i for i, event in enumerate(events) if event.kind == "train_start")
    assert sum(event.kind == "admit" for event in events[:first]) == 4, "two steps of two groups"
    assert tomllib.loads((tmp_path / "converted.toml").read_text())["rollout"]["overlap"]


def test_dapo_replaces_uniform_groups_and_shapes_long_answers(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    rows, records, _ = trained_file(tmp_path, "run_dapo.sh", DAPO)
    assert rows[-1]["filtered/zero_variance/groups"] > 0
    assert {row["train/updates"] for row in rows} == {2}
    groups: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        if record["advantage"] is not None:
            groups.setdefault(record["group_id"], []).append(record)
    assert len(groups) == 4
    assert any(len({record["num_tokens"] for record in group}) > 1 for group in groups.values())
    for group in groups.values():
        shaped = [record["score"] - max(0, record["num_tokens"] - 16) / 32 for record in group]
        spread = statistics.stdev(shaped) + 1e-6
        expected = [(one - statistics.mean(shaped)) / spread for one in shaped]
        assert [record["advantage"] for record in group] == pytest.approx(expected, abs=1e-3)
