"""`rollover convert` of Axolotl's YAML: what is read, what its own trainer is here, and what is asked about."""

from __future__ import annotations

import pytest

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
