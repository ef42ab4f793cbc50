"""`rollover convert` of LightRFT's launch scripts: what of bash and of the flags is read, and what is asked about."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollover import cli
from rollover.config import Config
from rollover.config.load import load_config
from rollover.plugins.convert.lightrft.script import options_of_flags

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
ANSWERS = ["--rewards.function", "boxed", "--train.num_steps", "30"]


def file(tmp_path: Path, more: str = "") -> str:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("    --bf16", f"    {more} \\\n    --bf16") if more else SCRIPT)
    return str(path)


def converted(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Config, str]:
    assert cli.main(["convert", *argv]) == 0
    out, err = capsys.readouterr()
    return load_config([tomllib.loads(out)]).config, out + err


def test_flags_are_read_up_to_the_end_of_their_command() -> None:
    options: dict[str, Any] = options_of_flags(SCRIPT, Path("run.sh"), {})
    assert options["pretrain"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert options["rollout_batch_size"] == 128
    assert options["train_batch_size"] == 256
    assert options["adam_betas"] == [0.9, 0.99]
    assert options["freezing_actor_steps"] == -1
    assert options["use_kl_loss"] is True
    assert options["save_path"] == "results/lightrft-grpo-now"
    assert "nnodes" not in options
    assert "append" not in options
    assert options_of_flags(SCRIPT.replace("--text_only ", ""), Path("run.sh"), {})["text_only"] is False


def test_the_toml_loads_and_has_what_lightrft_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, text = converted([file(tmp_path), *ANSWERS], capsys)
    assert (config.rollout.groups_per_step, config.rollout.group_size) == (128, 8)
    assert (config.train.minibatches_per_step, config.train.epochs_per_step, config.train.reshuffle) == (4, 2, False)
    assert (config.algorithm.advantage, config.algorithm.aggregation) == ("grpo", "seq-mean-token-mean")
    assert (config.algorithm.kl_in, config.algorithm.kl_kind, config.algorithm.kl_coef) == ("loss", "k3", 0.01)
    assert config.algorithm.correction == "none"
    assert not config.algorithm.allow_uncorrected
    assert (config.train.schedule, config.train.min_lr_ratio) == ("cosine", 0.1)
    assert config.train.adam_beta2 == 0.99
    assert config.rollout.interrupt == "never"
    assert config.rewards.function == "boxed"
    assert "group_size = 8  # n_samples_per_prompt = 8\n" in text
    assert "label_key is left out" in text


def test_partial_rollouts_are_continued_with_bounded_age(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [file(tmp_path, "--use_partial --partial_percent 0.6"), *ANSWERS]
    config, _ = converted(argv, capsys)
    rollout = config.rollout
    assert (rollout.interrupt, rollout.token_budget, rollout.complete_fraction) == ("token_budget", 1024, 0.6)
    assert (rollout.max_continuations, rollout.in_flight_groups, rollout.max_staleness) == (1, 128, 1)
    assert config.algorithm.allow_uncorrected
    config, _ = converted(
        [*argv, "--algorithm.correction", "token_truncate", "--algorithm.allow_uncorrected", "false"], capsys
    )
    assert config.algorithm.correction == "token_truncate"


@pytest.mark.parametrize("name", ["max_budget", "max_token_budget"])
def test_the_budget_of_a_partial_rollout_is_taken_as_it_is(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = converted([file(tmp_path, f"--use_partial --{name} 512"), *ANSWERS], capsys)
    assert config.rollout.token_budget == 512
    config, _ = converted([file(tmp_path, f"--{name} 512"), *ANSWERS], capsys)
    assert config.rollout.interrupt == "never"


@pytest.mark.parametrize(
    ("flags", "named", "answer"),
    [
        ("--use_gspo", "use_gspo", ["--accept", "use_gspo"]),
        ("--loss_agg_mode token-mean", "loss_agg_mode", ["--accept", "loss_agg_mode"]),
        ("--dynamic_sampling", "dynamic_sampling", ["--accept", "dynamic_sampling"]),
        ("--train_batch_size 192", "train_batch_size", ["--train.minibatches_per_step", "4"]),
        ("--kl_estimator k1", "kl_estimator", ["--algorithm.kl_kind", "k1+"]),
        ("--advantage_estimator rloo", "advantage_estimator", ["--algorithm.advantage", "rloo"]),
        ("--reward_clip 5", "reward_clip", ["--accept", "reward_clip"]),
        ("--use_partial --generate_max_len 512", "use_partial", ["--rollout.token_budget", "128"]),
        ("--surprise 3", "surprise", ["--accept", "surprise"]),
    ],
)
def test_what_would_change_learning_has_to_be_answered(
    flags: str, named: str, answer: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(tmp_path, flags)
    assert cli.main(["convert", path, *ANSWERS]) == 2
    assert f"  {named}: " in capsys.readouterr().err
    assert cli.main(["convert", path, *ANSWERS, *answer]) == 0


def test_rewards_are_asked_about_and_images_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("    --text_only \\\n", ""))
    assert cli.main(["convert", str(path), "--train.num_steps", "30"]) == 2
    err = capsys.readouterr().err
    assert "set --rewards.function" in err
    assert "text_only" not in err


def test_openrlhf_is_not_taken_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python3 -m openrlhf.cli.train_ppo_ray --pretrain me/mine --rollout_batch_size 8\n")
    assert cli.main(["convert", str(path)]) == 2
    assert "--from" in capsys.readouterr().err


def test_evaluations_draw_as_training_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = converted([file(tmp_path, "--temperature 0.7 --top_p 0.9 --eval_steps 20"), *ANSWERS], capsys)
    assert (config.eval.temperature, config.eval.top_p) == (0.7, 0.9)
    assert config.eval.samples_per_task == config.rollout.group_size
    assert not config.eval.at_start
