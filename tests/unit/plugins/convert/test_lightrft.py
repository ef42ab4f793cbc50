"""`rollover convert` of LightRFT's launch scripts: what of bash and of the flags is read, and what is asked about."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollover.plugins.convert.lightrft import options_of_flags

SCRIPT = """#!/bin/bash
MODEL="Qwen/Qwen2.5-0.5B-Instruct"
NAME="lightrft-grpo"
RBS=128
KL=0.01  # a comment
now=$(date +"%Y%m%d_%H%M%S")
mkdir -p "results/${NAME}"
torchrun --nnodes $NNODES --master-port 20090 \\
    examples/gsm8k_geo3k/train_colocate.py \\
    --pretrain "${MODEL}" \\
    --text_only \\
    --advantage_estimator "group_norm" \\
    --use_kl_loss --kl_estimator "k3" --init_kl_coef $KL \\
    --reward_pretrain "{}" \\
    --save_path "results/${NAME}-${now}" \\
    --rollout_batch_size ${RBS} --train_batch_size=256 \\
    --n_samples_per_prompt 8 \\
    --max_epochs 2 \\
    --adam_betas 0.9 0.99 \\
    --generate_max_len 4096 \\
    --actor_learning_rate 1e-6 \\
    --prompt_data /data/gsm8k --input_key prompt --label_key label \\
    --apply_chat_template --system_prompt 'Put it in \\\\boxed{}: costs $5' \\
    --save_steps 20 --freezing_actor_steps -1 \\
    --bf16 --fsdp --engine_type sglang \\
    2>&1 | tee "logs/${NAME}.log" --append
"""
ANSWERS = ("--rewards.function", "boxed", "--train.num_steps", "30")


def with_flags(more: str) -> str:
    return SCRIPT.replace("    --bf16", f"    {more} \\\n    --bf16")


def test_flags_are_read_up_to_the_end_of_their_command() -> None:
    options = options_of_flags(SCRIPT, Path("run.sh"), {})
    expected = {
        "pretrain": "Qwen/Qwen2.5-0.5B-Instruct", "rollout_batch_size": 128, "train_batch_size": 256,
        "adam_betas": [0.9, 0.99], "freezing_actor_steps": -1, "use_kl_loss": True,
        "save_path": "results/lightrft-grpo-now",
    }  # fmt: skip
    assert {name: options[name] for name in expected} == expected
    assert options.keys().isdisjoint(("nnodes", "append"))
    assert options_of_flags(SCRIPT.replace("--text_only ", ""), Path("run.sh"), {})["text_only"] is False


def test_the_toml_loads_and_has_what_lightrft_does(convert_file) -> None:
    config, text = convert_file("run.sh", with_flags("--temperature 0.7 --eval_steps 20"), *ANSWERS)
    assert (config.rollout.groups_per_step, config.rollout.group_size) == (128, 8)
    assert (config.train.minibatches_per_step, config.train.epochs_per_step, config.train.reshuffle) == (4, 2, False)
    assert (config.algorithm.advantage, config.algorithm.aggregation) == ("grpo", "seq-mean-token-mean")
    assert (config.algorithm.kl_in, config.algorithm.kl_kind, config.algorithm.kl_coef) == ("loss", "k3", 0.01)
    assert (config.algorithm.correction, config.algorithm.allow_uncorrected) == ("none", False)
    assert (config.train.schedule, config.train.min_lr_ratio, config.train.adam_beta2) == ("cosine", 0.1, 0.99)
    assert (config.rollout.interrupt, config.rewards.function) == ("never", "boxed")
    assert (config.eval.temperature, config.eval.samples_per_task, config.eval.at_start) == (0.7, 8, False)
    assert "group_size = 8  # n_samples_per_prompt = 8\n" in text
    assert "label_key is left out" in text


def test_partial_rollouts_are_continued_with_bounded_age(convert_file) -> None:
    text = with_flags("--use_partial --partial_percent 0.6")
    config, _ = convert_file("run.sh", text, *ANSWERS)
    rollout = config.rollout
    assert (rollout.interrupt, rollout.token_budget, rollout.complete_fraction) == ("token_budget", 1024, 0.6)
    assert (rollout.max_continuations, rollout.in_flight_groups, rollout.max_staleness) == (1, 128, 1)
    assert config.algorithm.allow_uncorrected
    corrected = ("--algorithm.correction", "token_truncate", "--algorithm.allow_uncorrected", "false")
    assert convert_file("run.sh", text, *ANSWERS, *corrected)[0].algorithm.correction == "token_truncate"


@pytest.mark.parametrize("name", ["max_budget", "max_token_budget"])
def test_the_budget_of_a_partial_rollout_is_taken_as_it_is(name: str, convert_file) -> None:
    config, _ = convert_file("run.sh", with_flags(f"--use_partial --{name} 512"), *ANSWERS)
    assert config.rollout.token_budget == 512
    assert convert_file("run.sh", with_flags(f"--{name} 512"), *ANSWERS)[0].rollout.interrupt == "never"


@pytest.mark.parametrize(
    ("flags", "named", "answer"),
    [
        ("--use_gspo", "use_gspo", "--accept use_gspo"),
        ("--train_batch_size 192", "train_batch_size", "--train.minibatches_per_step 4"),
        ("--kl_estimator k1", "kl_estimator", "--algorithm.kl_kind k1+"),
        ("--advantage_estimator rloo", "advantage_estimator", "--algorithm.advantage rloo"),
        ("--reward_clip 5", "reward_clip", "--accept reward_clip"),
        ("--use_partial --generate_max_len 512", "use_partial", "--rollout.token_budget 128"),
        ("--surprise 3", "surprise", "--accept surprise"),
    ],
)
def test_what_would_change_learning_has_to_be_answered(
    flags: str, named: str, answer: str, convert_file, refuse_file
) -> None:
    assert f"  {named}: " in refuse_file("run.sh", with_flags(flags), *ANSWERS)
    convert_file("run.sh", with_flags(flags), *ANSWERS, *answer.split())


def test_rewards_are_asked_about_and_images_are_not(refuse_file) -> None:
    err = refuse_file("run.sh", SCRIPT.replace("    --text_only \\\n", ""), "--train.num_steps", "30")
    assert "set --rewards.function" in err and "text_only" not in err


def test_openrlhf_is_not_taken_for_it(refuse_file) -> None:
    text = "python3 -m openrlhf.cli.train_ppo_ray --pretrain me/mine --rollout_batch_size 8\n"
    assert "--from" in refuse_file("run.sh", text)
