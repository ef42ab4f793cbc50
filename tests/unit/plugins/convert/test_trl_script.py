"""`rollover convert` of TRL: scripts by their syntax tree, commands and YAMLs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollover.plugins.convert.mapping import Unknown
from rollover.plugins.convert.trl.script import options_of_trl_script

SCRIPT = '''
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from my_rewards import short

RATE = 2 * 1e-6
NAME = "me/mine"


def right(completions, answer, **kwargs):
    """open("ran", "w")"""
    return [float(a in c) for c, a in zip(completions, answer)]


def main():
    dataset = load_dataset("json", data_files="train.jsonl", split="train")
    args = GRPOConfig(
        output_dir=f"out/{NAME}", learning_rate=RATE, per_device_train_batch_size=16, num_generations=4,
        gradient_accumulation_steps=2, max_steps=30, max_completion_length=2**6, loss_type="grpo", beta=0.04,
        reward_weights=[1.0, 0.5], logging_steps=1,
    )
    args.temperature = 0.7
    model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.bfloat16, revision="v1")
    trainer = GRPOTrainer(
        model=model, reward_funcs=[right, short], args=args, train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(NAME), peft_config=LoraConfig(r=16, lora_alpha=8),
    )
    trainer.train()


if __name__ == "__main__":
    main()
'''


@pytest.fixture(autouse=True)
def in_a_folder_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder has train.jsonl with a prompt that is a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))


def test_a_script_becomes_a_configuration(tmp_path: Path, convert_file) -> None:
    config, out = convert_file("script.py", SCRIPT)
    assert not Path("ran").exists()
    assert (config.model.path, config.model.revision) == ("me/mine", "v1")
    assert (config.model.lora.rank, config.model.lora.alpha) == (16, 8.0)
    assert config.model.lora.target_modules == ["q_proj", "v_proj"]
    assert (config.rollout.groups_per_step, config.rollout.group_size) == (8, 4)
    assert (config.train.num_steps, config.train.minibatches_per_step) == (30, 1)
    assert (config.rollout.max_new_tokens, config.rollout.temperature) == (64, 0.7)
    assert (config.train.learning_rate, config.train.schedule, config.run.seed) == (2e-6, "linear", 42)
    assert (config.algorithm.kl_coef, config.algorithm.correction) == (0.04, "none")
    assert [(row.function, row.weight) for row in config.rewards.functions] == [
        (f"{tmp_path}/script.py:right", 1.0),
        ("my_rewards:short", 0.5),
    ]
    assert (config.tasks.sources[0].path, config.tasks.chat, config.tasks.eval_fraction) == ("train.jsonl", False, 0)
    assert "temperature = 0.7  # temperature = 0.7\n" in out
    assert "adam_beta2 = 0.999  # adam_beta2 = 0.999, the default\n" in out
    assert "# logging_steps: what is shown" in out


@pytest.mark.parametrize(
    ("before", "after", "said", "answer"),
    [
        ("learning_rate=RATE", "learning_rate=float(input())", "`input()` (line 21)",
         ["--train.learning_rate", "1e-5"]),
        ("max_steps=30", "max_steps=STEPS", "`STEPS` (line", ["--train.num_steps", "9"]),
        ('if __name__ == "__main__":\n    main()', "main()", "trains when it is imported",
         ["--rewards.function", "a:b", "--accept", "reward_weights"]),
        ('split="train")', 'split="train").map(right)', ".map (line", ["--accept", "rows"]),
        (
            'load_dataset("json", data_files="train.jsonl", split="train")', "Dataset.from_list([])",
            "`Dataset.from_list([])` (line", ["--tasks.sources.0.path", "train.jsonl", "--tasks.chat", "false"],
        ),
        ("[right, short]", "[right, lambda completions: [0.0]]", "a reward is a function",
         ["--rewards.function", "a:b", "--accept", "reward_weights"]),
        ("peft_config=LoraConfig(r=16", "callbacks=[Mine()], peft_config=LoraConfig(r=16", "`Mine()` (line",
         ["--accept", "callbacks"]),
        ("r=16,", "r=16, layers_to_transform=[1],", "no option for layers_to_transform", ["--model.lora.rank", "8"]),
        ("logging_steps=1", "not_a_field=1", "not_a_field: is not known here", ["--accept", "not_a_field"]),
        ("logging_steps=1", "steps_per_generation=4, num_iterations=3, gradient_accumulation_steps=3",
         "each update has whole groups", ["--train.minibatches_per_step", "1", "--train.num_steps", "10",
          "--checkpoint.every_steps", "5", "--rollout.groups_per_step", "16", "--algorithm.kl_coef", "0.1"]),
    ],
)  # fmt: skip
def test_what_is_not_read_or_has_no_counterpart_is_asked_about(
    before: str, after: str, said: str, answer: list[str], convert_file, refuse_file
) -> None:
    assert before in SCRIPT
    text = SCRIPT.replace("gradient_accumulation_steps=2, ", "") if "gradient" in after else SCRIPT
    assert said in refuse_file("script.py", text.replace(before, after))
    convert_file("script.py", text.replace(before, after), *answer)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("from trl import SFTTrainer\n", "a.py", "no system has such options"),
        ("GRPOTrainer(model='a')\nGRPOTrainer(model='b')\n", "a.py", "2 calls of GRPOTrainer"),
        (
            "trl grpo --num_generations 4\ntrl grpo --num_generations 8\n",
            "a.sh",
            "num_generations: 2 commands train, and differ in it (line 1: 4; line 2: 8)",
        ),
        ("trl grpo --config none.yaml\n", "a.sh", "none.yaml cannot be read"),
    ],
)
def test_a_file_that_holds_no_one_run_is_refused(text: str, name: str, said: str, refuse_file) -> None:
    assert said in refuse_file(name, text)


def test_names_that_depend_on_a_condition_or_are_changed_are_not_taken(tmp_path: Path) -> None:
    text = (
        "if flag:\n    model = 'a'\nelse:\n    model = 'b'\nrewards = [one]\nrewards.append(two)\n"
        "steps = 3\nsteps += 1\nGRPOTrainer(model=model, reward_funcs=rewards, args=GRPOConfig(max_steps=steps))\n"
    )
    options: dict[str, Any] = options_of_trl_script(text, tmp_path / "a.py")
    assert options["model"] == Unknown("`model` depends on the condition of line 1")
    assert isinstance(options["reward_funcs"], Unknown)
    assert isinstance(options["max_steps"], Unknown)


def test_of_several_splits_each_name_has_its_own(tmp_path: Path) -> None:
    text = "rows, held_out = load_dataset('me/rows', split=['train', 'test[:5%]'])\nGRPOTrainer(train_dataset={})\n"
    options = options_of_trl_script(text.format("rows, eval_dataset=held_out"), tmp_path / "a.py")
    assert (options["train_dataset"], options["eval_dataset"]) == (
        {"path": "me/rows", "split": "train"},
        {"path": "me/rows", "split": "test"},
    )
    assert isinstance(options["rows"], Unknown), "5 % of the test rows"
    both = text.replace("rows, held_out", "rows").format("rows")
    assert isinstance(options_of_trl_script(both, tmp_path / "a.py")["train_dataset"], Unknown)


FLAGS = {"model_name_or_path": "me/mine", "dataset_name": "train.jsonl", "max_steps": 10, "num_generations": 4,
         "learning_rate": 1e-5, "reward_funcs": ["accuracy_reward"], "use_peft": True, "lora_r": 4}  # fmt: skip


def test_a_command_is_read(convert_file) -> None:
    words = " ".join(f"--{k} {' '.join(v) if isinstance(v, list) else v}" for k, v in FLAGS.items() if k != "use_peft")
    text = f"#!/bin/bash\nP=2\naccelerate launch --num_processes $P grpo.py \\\n {words} --use_peft\n"
    config, _ = convert_file("a.sh", text, "--tasks.chat", "true")
    assert (config.model.path, config.model.lora.rank, config.train.learning_rate) == ("me/mine", 4, 1e-5)
    assert (config.rollout.groups_per_step, config.rewards.function) == (4, "trl.rewards:accuracy_reward")


def test_a_yaml_is_read_by_itself_and_where_a_command_names_it(convert_file) -> None:
    config, _ = convert_file("grpo.yaml", json.dumps(FLAGS), "--tasks.chat", "true")
    assert (config.rollout.group_size, config.train.num_steps) == (4, 10)
    other, _ = convert_file("b.sh", "trl grpo --config grpo.yaml --max_steps 20\n", "--tasks.chat", "true")
    assert other.train.num_steps == 20
    assert other.rollout == config.rollout
