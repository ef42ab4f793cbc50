"""Configurations of Axolotl, LightRFT and rLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollover.plugins.convert.lightrft import options_of_flags

# `rollover convert` of Axolotl's YAML: what is read, what its own trainer is here, and what is asked about


ASYNCHRONOUS = """
base_model: me/mine
rl: grpo
chat_template: tokenizer_default
adapter: lora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
vllm:
  port: 8000
  gpu_memory_utilization: 0.85
  max_model_len: 2048
trl:
  use_vllm: true
  use_data_producer: true
  async_prefetch: true
  prefetch_depth: 2
  vllm_sync_interval: 4
  num_generations: 8
  max_completion_length: 512
  temperature: 0.7
  num_iterations: 2
  reward_funcs:
    - rewards.accuracy
    - rewards.form
  reward_weights: [1.0, 0.5]
  vllm_importance_sampling_mode: sequence_truncate
  off_policy_mask_threshold: 0.5
datasets:
  - path: openai/gsm8k
    name: main
    split: train
val_set_size: 0.0
early_stopping_patience:
micro_batch_size: 4
gradient_accumulation_steps: 8
max_steps: 200
learning_rate: 5e-6
warmup_steps: 10
save_steps: 0.5
logging_steps: 1
special_tokens:
  pad_token: "<|endoftext|>"
"""


def changed(*pairs: tuple[str, str]) -> str:
    """The file with other texts in the place of some."""
    text = ASYNCHRONOUS
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def test_the_asynchronous_trainer_is_generation_ahead_of_training(convert_file) -> None:
    config, text = convert_file("mine.yaml", ASYNCHRONOUS)
    assert (config.rollout.groups_per_step, config.rollout.group_size) == (4, 8)
    assert (config.rollout.overlap, config.rollout.interrupt, config.rollout.in_flight_groups) == (True, "never", 12)
    assert config.train.epochs_per_step == 2
    assert config.train.publish_every == 2  # 4 updates are 2 steps
    assert config.rollout.max_staleness == 3  # two batches ahead, of weights that are a step old
    assert (config.train.num_steps, config.checkpoint.every_steps) == (100, 50)  # of 200 updates
    assert (config.algorithm.correction, config.algorithm.correction_cap) == ("sequence_truncate", 3.0)
    assert config.algorithm.correction_floor == pytest.approx(1 / 3, abs=1e-5)
    assert config.algorithm.off_policy_mask_above == 0.5
    assert (config.tasks.max_prompt_tokens, config.tasks.eval_fraction) == (2048 - 512, 0)
    assert config.train.learning_rate == 5e-6
    assert [(row.function, row.weight) for row in config.rewards.functions] == [
        ("rewards:accuracy", 1.0),
        ("rewards:form", 0.5),
    ]
    assert config.model.lora.target_modules == ["all-linear"]
    (source,) = config.tasks.sources
    assert (source.path, source.subset, source.split) == ("openai/gsm8k", "main", "train")
    assert "group_size = 8  # trl.num_generations = 8\n" in text
    assert "logging_steps is left out" in text
    assert "early_stopping_patience" not in text  # a key without a value sets nothing


def test_weights_wait_only_where_generation_runs_ahead(convert_file) -> None:
    config, _ = convert_file("mine.yaml", changed(("async_prefetch: true", "async_prefetch: false")))
    assert (config.train.publish_every, config.rollout.max_staleness, config.rollout.overlap) == (1, 0, False)
    config, _ = convert_file("mine.yaml", ASYNCHRONOUS + "context_parallel_size: 2\n")
    assert (config.rollout.overlap, config.rollout.max_staleness, config.replay.size) == (False, 0, 0)


def test_groups_are_streamed_as_they_come(convert_file) -> None:
    streamed = "  streaming_partial_batch: true\n  streaming_min_groups: 2\n  reward_num_workers: 0\n"
    text = changed(("  num_iterations: 2\n", streamed + "  replay_buffer_size: 64\n"),
                   ("sequence_truncate", "token_mask"))  # fmt: skip
    config, output = convert_file("mine.yaml", text)
    assert (config.rewards.streaming, config.train.streaming_min_groups, config.rewards.num_workers) == (True, 2, 1)
    notes = output[output.index("# Notes:") : output.index("# Left out:")]
    assert "# trl.replay_buffer_size: their age is bounded here, and a step of `streaming_partial_batch` is" in notes
    assert "# trl.vllm_importance_sampling_mode: a masked weight is 0 here; in Axolotl's own trainer it comes" in notes
    of_one = changed(("micro_batch_size: 4", "micro_batch_size: 1"), ("  num_iterations: 2\n", streamed))
    config, _ = convert_file("mine.yaml", of_one)
    assert (config.rollout.groups_per_step, config.rewards.streaming, config.train.streaming_min_groups) == (1, True, 0)


def test_options_that_set_nothing_are_left_out_visibly(convert_file) -> None:
    _, text = convert_file("mine.yaml", changed(
        ("use_data_producer: true", "use_data_producer: false"),
        ("async_prefetch: true", "async_prefetch: false\n  replay_buffer_size: 64")))  # fmt: skip
    for name in ("trl.replay_buffer_size", "trl.prefetch_depth", "trl.vllm_sync_interval"):
        assert f"{name} is left out: sets nothing, given the other options" in text


def test_without_vllm_nothing_is_corrected_and_with_it_as_trl_does(convert_file) -> None:
    own = ("use_data_producer", "async_prefetch", "importance_sampling")
    lines = [line for line in ASYNCHRONOUS.splitlines(keepends=True) if not any(name in line for name in own)]
    config, _ = convert_file("mine.yaml", "".join(lines))
    assert (config.algorithm.correction, config.algorithm.correction_floor) == ("sequence_mask", 0.0)
    assert (config.rollout.overlap, config.train.publish_every) == (False, 1)
    config, _ = convert_file("mine.yaml", "".join(lines).replace("use_vllm: true", "use_vllm: false"))
    assert config.algorithm.correction == "none"


def test_what_trl_counts_in_updates_is_counted_in_steps(convert_file) -> None:
    kl = "  beta: 0.04\n  sync_ref_model: true\n  ref_model_sync_steps: 24\n  ref_model_mixup_alpha: 1.0\n"
    with_kl = ("  temperature: 0.7\n", f"  temperature: 0.7\n{kl}  repetition_penalty: 1.1\n")
    config, _ = convert_file("mine.yaml", changed(with_kl))
    assert config.algorithm.reference_refresh_steps == 12  # of 24 updates, two a step
    assert not config.algorithm.allow_uncorrected  # with vLLM the penalty is corrected for
    assert config.rollout.logits.repetition_penalty == 1.1
    several = ("  num_iterations: 2\n", "  generation_batch_size: 96\n")
    config, _ = convert_file("mine.yaml", changed(with_kl, several))
    assert (config.train.minibatches_per_step, config.rollout.groups_per_step) == (3, 12)
    assert config.algorithm.reference_refresh_steps == 8


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("plugins: [mine.Plugin]", "--accept plugins"),
        ("nemo_gym_dir: ~/Gym\nnemo_gym_enabled: true", "--accept nemo_gym_*"),
        ("surprise: 3", "--accept surprise"),
        ("lr_scheduler: rex", "--train.schedule cosine"),
        ("optimizer: lion_8bit", "--train.optimizer adamw"),
        ("gradient_accumulation_steps: 3", "--rollout.groups_per_step 4"),
        ("num_epochs: 1.5\nmax_steps: 0", "--tasks.epochs 2 --train.num_steps 9"),
        ("val_set_size: 32", "--tasks.eval_fraction 0.2 --accept val_set_size"),
    ],
)
def test_what_would_change_learning_has_to_be_answered(line: str, answer: str, convert_file, refuse_file) -> None:
    err = refuse_file("mine.yaml", f"{ASYNCHRONOUS}{line}\n")
    assert line.partition(":")[0] in err
    if "*" in answer:  # options of one thing are asked about once
        assert "  nemo_gym_dir, nemo_gym_enabled: " in err and "(answer with --accept 'nemo_gym_*')" in err
    convert_file("mine.yaml", f"{ASYNCHRONOUS}{line}\n", *answer.split())


def test_rows_that_go_through_a_function_are_asked_about(convert_file, refuse_file) -> None:
    text = changed(("    name: main\n", "    name: main\n    type: rewards.transform\n"))
    assert "datasets: its rows go through rewards.transform" in refuse_file("mine.yaml", text)
    config, _ = convert_file("mine.yaml", text, "--accept", "datasets")  # the rows as they are
    assert config.tasks.sources[0].path == "openai/gsm8k"


def test_a_model_of_the_hub_is_a_reward_model(convert_file) -> None:
    config, _ = convert_file("mine.yaml", changed(("rewards.form", "me/reward-model")))
    assert config.rewards.functions[1].function == "reward_model"
    assert config.rewards.functions[1].params == {"path": "me/reward-model"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("base_model: me/mine\nrl: dpo\n", "rl: dpo trains on no rollouts"),
        ("base_model: me/mine\n", "rl: None trains on no rollouts"),
        ("hello: 1\n", "--from"),
        ("base_model: me/mine\nrl: grpo\ntrainer: {total_epochs: 1}\n", "more than one system"),
    ],
)
def test_what_is_no_such_file_is_refused(text: str, why: str, refuse_file) -> None:
    assert why in refuse_file("mine.yaml", text)


def test_the_system_may_be_told(convert_file, refuse_file) -> None:
    words = ("--from", "axolotl", "--accept", "trainer.*")
    assert "of axolotl" in convert_file("mine.yaml", ASYNCHRONOUS + "trainer: {total_epochs: 1}\n", *words)[1]
    assert "a file of axolotl is one of .yaml, .yml" in refuse_file("a.sh", "x", "--from", "axolotl")


@pytest.mark.parametrize(("path", "subset"), [("rows.jsonl", ""), ("copies/gsm8k", "main")])
def test_a_file_in_the_place_of_a_data_set_has_no_subset(path: str, subset: str, convert_file) -> None:
    (source,) = convert_file("mine.yaml", ASYNCHRONOUS, "--tasks.sources.0.path", path)[0].tasks.sources
    assert (source.path, source.subset) == (path, subset)


# `rollover convert` of LightRFT's launch scripts: what of bash and of the flags is read, and what is asked about


LIGHTRFT = """#!/bin/bash
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
LIGHTRFT_ANSWERS = ("--rewards.function", "boxed", "--train.num_steps", "30")


def with_flags(more: str) -> str:
    return LIGHTRFT.replace("    --bf16", f"    {more} \\\n    --bf16")


def test_flags_are_read_up_to_the_end_of_their_command() -> None:
    options = options_of_flags(LIGHTRFT, Path("run.sh"), {})
    expected = {
        "pretrain": "Qwen/Qwen2.5-0.5B-Instruct", "rollout_batch_size": 128, "train_batch_size": 256,
        "adam_betas": [0.9, 0.99], "freezing_actor_steps": -1, "use_kl_loss": True,
        "save_path": "results/lightrft-grpo-now",
    }  # fmt: skip
    assert {name: options[name] for name in expected} == expected
    assert options.keys().isdisjoint(("nnodes", "append"))
    assert options_of_flags(LIGHTRFT.replace("--text_only ", ""), Path("run.sh"), {})["text_only"] is False


def test_the_toml_loads_and_has_what_lightrft_does(convert_file) -> None:
    config, text = convert_file("run.sh", with_flags("--temperature 0.7 --eval_steps 20"), *LIGHTRFT_ANSWERS)
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
    config, _ = convert_file("run.sh", text, *LIGHTRFT_ANSWERS)
    rollout = config.rollout
    assert (rollout.interrupt, rollout.token_budget, rollout.complete_fraction) == ("token_budget", 1024, 0.6)
    assert (rollout.max_continuations, rollout.in_flight_groups, rollout.max_staleness) == (1, 128, 1)
    assert config.algorithm.allow_uncorrected
    corrected = ("--algorithm.correction", "token_truncate", "--algorithm.allow_uncorrected", "false")
    assert convert_file("run.sh", text, *LIGHTRFT_ANSWERS, *corrected)[0].algorithm.correction == "token_truncate"


@pytest.mark.parametrize("name", ["max_budget", "max_token_budget"])
def test_the_budget_of_a_partial_rollout_is_taken_as_it_is(name: str, convert_file) -> None:
    config, _ = convert_file("run.sh", with_flags(f"--use_partial --{name} 512"), *LIGHTRFT_ANSWERS)
    assert config.rollout.token_budget == 512
    assert convert_file("run.sh", with_flags(f"--{name} 512"), *LIGHTRFT_ANSWERS)[0].rollout.interrupt == "never"


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
def test_what_changes_learning_of_lightrft_is_asked(
    flags: str, named: str, answer: str, convert_file, refuse_file
) -> None:
    assert f"  {named}: " in refuse_file("run.sh", with_flags(flags), *LIGHTRFT_ANSWERS)
    convert_file("run.sh", with_flags(flags), *LIGHTRFT_ANSWERS, *answer.split())


def test_rewards_are_asked_about_and_images_are_not(refuse_file) -> None:
    err = refuse_file("run.sh", LIGHTRFT.replace("    --text_only \\\n", ""), "--train.num_steps", "30")
    assert "set --rewards.function" in err and "text_only" not in err


def test_openrlhf_is_not_taken_for_it(refuse_file) -> None:
    text = "python3 -m openrlhf.cli.train_ppo_ray --pretrain me/mine --rollout_batch_size 8\n"
    assert "--from" in refuse_file("run.sh", text)


# `rollover convert` of rLLM's launch scripts: verl's options with rLLM's names, defaults and rules


RLLM = """python -u train.py rllm/backend=verl actor_rollout_ref.model.path=me/mine \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 {}
"""
RLLM_ANSWERS = ("--accept", "train.py", "--tasks.sources.0.path", "rows.jsonl", "--train.num_steps", "9")


def test_the_defaults_are_those_of_rllm(convert_file) -> None:
    config, _ = convert_file("train_verl.sh", RLLM.format(""), *RLLM_ANSWERS)
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
    config, _ = convert_file("train_verl.sh", RLLM.format(further), *RLLM_ANSWERS, "--model.lora.rank", "32")
    assert (config.rollout.group_size, config.rollout.temperature, config.rollout.groups_per_step) == (4, 0.7, 32)
    assert (config.eval.temperature, config.eval.samples_per_task, config.eval.every_steps) == (0.6, 2, 7)
    assert (config.tasks.epochs, config.model.lora.rank) == (3, 32)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.1, 0.1)


@pytest.mark.parametrize(("rows", "updates"), [(32, 1), (64, 1), (128, 2)])
def test_a_step_has_as_many_updates_as_whole_minibatches(rows: int, updates: int, convert_file) -> None:
    config, _ = convert_file("train_verl.sh", RLLM.format(f"data.train_batch_size={rows}"), *RLLM_ANSWERS)
    assert config.train.minibatches_per_step == updates


def test_what_its_program_gives_in_python_is_asked_about(refuse_file) -> None:
    further = "rllm.async_training.enable=true rllm.async_training.mini_batch_size=8"
    error = refuse_file("train_verl.sh", RLLM.format(further))
    for said in ("--workflow.function", "--tasks.sources.0.path", "--accept rllm.async_training.enable"):
        assert said in error
    assert "--accept rllm.async_training.mini_batch_size" not in error
