"""`rollover convert` of rLLM's launch scripts: verl's options with rLLM's names, defaults and rules."""

from __future__ import annotations

import pytest

SCRIPT = """python -u train.py rllm/backend=verl actor_rollout_ref.model.path=me/mine \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 {}
"""
ANSWERS = ("--accept", "train.py", "--tasks.sources.0.path", "rows.jsonl", "--train.num_steps", "9")


def test_the_defaults_are_those_of_rllm(convert_file) -> None:
    config, _ = convert_file("train_verl.sh", SCRIPT.format(""), *ANSWERS)
    assert (config.rollout.groups_per_step, config.rollout.group_size) == (64, 8)
    assert (config.rollout.max_new_tokens, config.tasks.max_prompt_tokens, config.tasks.epochs) == (30720, 2048, 10)
    assert (config.eval.every_steps, config.eval.temperature, config.eval.at_start) == (5, 1.0, False)
    assert (config.algorithm.advantage, config.algorithm.advantage_std) == ("grpo", "population")


def test_options_have_rllms_names_too(convert_file) -> None:
    further = (
        "rllm.rollout.n=4 rllm.rollout.train.temperature=0.7 rllm.rollout.val.temperature=0.6 rllm.rollout.n_val=2"
        " rllm.trainer.total_epochs=3 rllm.trainer.test_freq=7 rllm.data.train_batch_size=32"
        " rllm.algorithm.eps_clip=0.1 rllm.workflow.n_parallel_tasks=64 actor_rollout_ref.model.lora.rank=32"
    )
    config, _ = convert_file("train_verl.sh", SCRIPT.format(further), *ANSWERS, "--model.lora.rank", "32")
    assert (config.rollout.group_size, config.rollout.temperature, config.rollout.groups_per_step) == (4, 0.7, 32)
    assert (config.eval.temperature, config.eval.samples_per_task, config.eval.every_steps) == (0.6, 2, 7)
    assert (config.tasks.epochs, config.model.lora.rank) == (3, 32)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.1, 0.1)


@pytest.mark.parametrize(("rows", "updates"), [(32, 1), (64, 1), (128, 2)])
def test_a_step_has_as_many_updates_as_whole_minibatches(rows: int, updates: int, convert_file) -> None:
    config, _ = convert_file("train_verl.sh", SCRIPT.format(f"data.train_batch_size={rows}"), *ANSWERS)
    assert config.train.minibatches_per_step == updates


def test_what_its_program_gives_in_python_is_asked_about(refuse_file) -> None:
    further = "rllm.async_training.enable=true rllm.async_training.mini_batch_size=8"
    error = refuse_file("train_verl.sh", SCRIPT.format(further))
    for said in ("--workflow.function", "--tasks.sources.0.path", "--accept rllm.async_training.enable"):
        assert said in error
    assert "--accept rllm.async_training.mini_batch_size" not in error
