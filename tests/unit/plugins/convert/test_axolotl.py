"""`rollover convert` of Axolotl's YAML: what is read, what its own trainer is here, and what is asked about."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollover import cli
from rollover.config import Config
from rollover.config.load import load_config

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


def file(tmp_path: Path, text: str = ASYNCHRONOUS, name: str = "mine.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def converted(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Config, str]:
    assert cli.main(["convert", *argv]) == 0
    out, err = capsys.readouterr()
    return load_config([tomllib.loads(out)]).config, out + err


def test_the_asynchronous_trainer_is_generation_ahead_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, text = converted([file(tmp_path)], capsys)
    assert (config.rollout.groups_per_step, config.rollout.group_size) == (4, 8)
    assert config.rollout.overlap
    assert config.rollout.interrupt == "never"
    assert config.rollout.in_flight_groups == 12
    assert config.train.epochs_per_step == 2
    assert config.train.publish_every == 2  # 4 updates are 2 steps
    assert config.rollout.max_staleness == 3  # two batches ahead, of weights that are a step old
    assert config.train.num_steps == 100  # of 200 updates
    assert config.checkpoint.every_steps == 50
    assert config.algorithm.correction == "sequence_truncate"
    assert config.algorithm.correction_cap == 3.0
    assert config.algorithm.correction_floor == pytest.approx(1 / 3, abs=1e-5)
    assert config.algorithm.off_policy_mask_above == 0.5
    assert config.tasks.max_prompt_tokens == 2048 - 512
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


def test_weights_wait_only_where_generation_runs_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ASYNCHRONOUS.replace("async_prefetch: true", "async_prefetch: false")
    config, _ = converted([file(tmp_path, text)], capsys)
    assert (config.train.publish_every, config.rollout.max_staleness, config.rollout.overlap) == (1, 0, False)


def test_groups_are_streamed_as_they_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    streamed = "  streaming_partial_batch: true\n  streaming_min_groups: 2\n  reward_num_workers: 0\n"
    text = ASYNCHRONOUS.replace("  num_iterations: 2\n", streamed)
    config, _ = converted([file(tmp_path, text)], capsys)
    assert config.rewards.streaming and config.train.streaming_min_groups == 2
    assert config.rewards.num_workers == 1


def test_what_works_differently_is_noted_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = "  streaming_partial_batch: true\n  streaming_min_groups: 2\n  replay_buffer_size: 64\n"
    text = ASYNCHRONOUS.replace("  num_iterations: 2\n", beside).replace("sequence_truncate", "token_mask")
    _, output = converted([file(tmp_path, text)], capsys)
    notes = output[output.index("# Notes:") : output.index("# Left out:")]
    assert "# trl.replay_buffer_size: their age is bounded here, and a step of `streaming_partial_batch` is" in notes
    assert "# trl.vllm_importance_sampling_mode: a masked weight is 0 here; in Axolotl's own trainer it comes" in notes


def test_with_sequence_parallelism_the_trainer_is_synchronous(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = converted([file(tmp_path, ASYNCHRONOUS + "context_parallel_size: 2\n")], capsys)
    assert (config.rollout.overlap, config.rollout.max_staleness, config.replay.size) == (False, 0, 0)


def test_options_that_set_nothing_are_left_out_visibly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ASYNCHRONOUS.replace("use_data_producer: true", "use_data_producer: false")
    text = text.replace("async_prefetch: true", "async_prefetch: false\n  replay_buffer_size: 64")
    _, toml = converted([file(tmp_path, text)], capsys)
    for name in ("trl.replay_buffer_size", "trl.prefetch_depth", "trl.vllm_sync_interval"):
        assert f"{name} is left out: sets nothing, given the other options" in toml


def test_nothing_is_held_out_where_nothing_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = converted([file(tmp_path, ASYNCHRONOUS.replace("val_set_size: 0.0\n", ""))], capsys)
    assert config.tasks.eval_fraction == 0


def test_without_vllm_nothing_is_corrected_and_with_it_as_trl_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(
        line
        for line in ASYNCHRONOUS.splitlines(keepends=True)
        if not any(name in line for name in ("use_data_producer", "async_prefetch", "importance_sampling"))
    )
    config, _ = converted([file(tmp_path, text)], capsys)
    assert (config.algorithm.correction, config.algorithm.correction_floor) == ("sequence_mask", 0.0)
    assert not config.rollout.overlap
    assert config.train.publish_every == 1
    config, _ = converted([file(tmp_path, text.replace("use_vllm: true", "use_vllm: false"))], capsys)
    assert config.algorithm.correction == "none"


def test_what_trl_counts_in_updates_is_counted_in_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kl = "  beta: 0.04\n  sync_ref_model: true\n  ref_model_sync_steps: 24\n  ref_model_mixup_alpha: 1.0\n"
    kl += "  repetition_penalty: 1.1\n"
    path = file(tmp_path, ASYNCHRONOUS.replace("  temperature: 0.7\n", f"  temperature: 0.7\n{kl}"))
    config, _ = converted([path], capsys)
    assert config.algorithm.reference_refresh_steps == 12  # of 24 updates, two a step
    assert not config.algorithm.allow_uncorrected  # with vLLM the penalty is corrected for
    assert config.rollout.logits.repetition_penalty == 1.1
    text = (tmp_path / "mine.yaml").read_text().replace("  num_iterations: 2\n", "  generation_batch_size: 96\n")
    config, _ = converted([file(tmp_path, text)], capsys)
    assert (config.train.minibatches_per_step, config.rollout.groups_per_step) == (3, 12)
    assert config.algorithm.reference_refresh_steps == 8


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("plugins: [mine.Plugin]", ["--accept", "plugins"]),
        ("nemo_gym_enabled: true", ["--accept", "nemo_gym_*"]),
        ("chat_template: chatml", ["--accept", "chat_template"]),
        ("surprise: 3", ["--accept", "surprise"]),
        ("lr_scheduler: rex", ["--train.schedule", "cosine"]),
        ("optimizer: lion_8bit", ["--train.optimizer", "adamw"]),
        ("gradient_accumulation_steps: 3", ["--rollout.groups_per_step", "4"]),
        ("num_epochs: 1.5\nmax_steps: 0", ["--tasks.epochs", "2", "--train.num_steps", "9"]),
        ("val_set_size: 32", ["--tasks.eval_fraction", "0.2", "--accept", "val_set_size"]),
    ],
)
def test_what_would_change_learning_has_to_be_answered(
    line: str, answer: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(tmp_path, ASYNCHRONOUS + line + "\n")
    assert cli.main(["convert", path]) == 2
    assert line.partition(":")[0] in capsys.readouterr().err
    assert cli.main(["convert", path, *answer]) == 0


def test_rows_that_go_through_a_function_are_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file(tmp_path, ASYNCHRONOUS.replace("    name: main\n", "    name: main\n    type: rewards.transform\n"))
    assert cli.main(["convert", path]) == 2
    err = capsys.readouterr().err
    assert "datasets: its rows go through rewards.transform" in err
    assert "adapter" not in err
    config, _ = converted([path, "--accept", "datasets"], capsys)  # the rows as they are
    assert config.tasks.sources[0].path == "openai/gsm8k"


def test_options_of_one_thing_are_asked_about_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file(tmp_path, ASYNCHRONOUS + "nemo_gym_dir: ~/Gym\nnemo_gym_enabled: true\n")
    assert cli.main(["convert", path]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "nemo_gym" in line)
    assert line.startswith("  nemo_gym_dir, nemo_gym_enabled: ")
    assert line.endswith("(answer with --accept 'nemo_gym_*')")


def test_a_model_of_the_hub_is_a_reward_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ASYNCHRONOUS.replace("rewards.form", "me/reward-model")
    config, _ = converted([file(tmp_path, text)], capsys)
    assert config.rewards.functions[1].function == "reward_model"
    assert config.rewards.functions[1].params == {"path": "me/reward-model"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("base_model: me/mine\nrl: dpo\n", "rl: dpo trains on no rollouts"),
        ("base_model: me/mine\n", "rl: None trains on no rollouts"),
        ("hello: 1\n", "--from"),
        ("trl: [\n", "no YAML"),
        ("base_model: me/mine\nrl: grpo\ntrainer: {total_epochs: 1}\n", "more than one system"),
    ],
)
def test_what_is_no_such_file_is_refused(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", file(tmp_path, text)]) == 2
    assert why in capsys.readouterr().err


def test_the_system_may_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both: dict[str, Any] = {"text": ASYNCHRONOUS + "trainer: {total_epochs: 1}\n"}
    path = file(tmp_path, **both)
    assert cli.main(["convert", path, "--from", "axolotl", "--accept", "trainer.*"]) == 0
    assert "of axolotl" in capsys.readouterr().out
    assert cli.main(["convert", file(tmp_path, "x", "a.sh"), "--from", "axolotl"]) == 2
    assert "a file of axolotl is one of .yaml, .yml" in capsys.readouterr().err


def test_streaming_of_a_step_of_one_group_has_no_least_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ASYNCHRONOUS.replace("micro_batch_size: 4", "micro_batch_size: 1")
    text = text.replace("prefetch_depth: 2", "prefetch_depth: 2\n  streaming_partial_batch: true")
    config, _ = converted([file(tmp_path, text)], capsys)
    assert config.rollout.groups_per_step == 1
    assert config.rewards.streaming
    assert config.train.streaming_min_groups == 0


def test_a_file_in_the_place_of_a_data_set_has_no_subset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = converted([file(tmp_path), "--tasks.sources.0.path", "rows.jsonl"], capsys)
    (source,) = config.tasks.sources
    assert (source.path, source.subset) == ("rows.jsonl", "")
    config, _ = converted([file(tmp_path), "--tasks.sources.0.path", "copies/gsm8k"], capsys)
    assert config.tasks.sources[0].subset == "main"
