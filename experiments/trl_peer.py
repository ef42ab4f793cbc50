"""TRL's GRPOTrainer on the work of `rollover bench step`: the same model, prompts, scores and, if wanted, lengths.

Needs the extra `bench`. GROUPS, SIZE and NEW_TOKENS are those of benchmarks/step.py.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import torch
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

from benchmarks import machine, step
from benchmarks.step import Step
from rollover.config import Config
from rollover.config.load import load_config
from rollover.models.load import load_model
from rollover.rewards.registry import load_reward
from rollover.tasks.stream import TaskStream


class Clock(TrainerCallback):
    """What each step took, and what came of it: `done`."""

    def __init__(self, steps: int) -> None:
        self.steps, self._started = steps, 0.0
        self.done: list[Step] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "reward" in logs:
            tokens = round(logs["completions/mean_length"] * step.GROUPS * step.SIZE)
            self.done.append(Step(time.perf_counter() - self._started, float(logs["reward"]), tokens))
            machine.progress(f"TRL: step {len(self.done)} of {self.steps}, reward {self.done[-1].reward:.3f}")


def run_trl(
    config: Config,
    steps: int,
    *,
    seed: int = 0,
    learning_rate: float = 1e-5,
    autocast: bool = False,
    micro_batch: int = 16,
    lengths: Sequence[Sequence[int]] | None = None,
) -> list[Step]:
    """Train on benchmarks/step.py's RECIPE; with `autocast` over float32 weights, else in bfloat16 weights.

    `micro_batch`: samples at a time in training; memory grows with it, the gradient stays the same. `lengths`
    [GROUPS][SIZE]: as for `run_ours`.
    """
    loaded = load_model(config.model, dtype=torch.float32 if autocast else torch.bfloat16)
    loaded.model.set_attn_implementation("sdpa")
    clock = Clock(steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            bf16=autocast,
            seed=seed,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=step.GROUPS * step.SIZE // micro_batch,
            num_generations=step.SIZE,
            max_completion_length=step.NEW_TOKENS,
            max_steps=steps,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",  # as ours; its default goes down to 0
            temperature=1.0,
            beta=0.0,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=loaded.model,
            reward_funcs=scored_in_turn if lengths is not None else scorer(),  # pyright: ignore[reportArgumentType]
            args=arguments,
            train_dataset=prompts(seed, step.GROUPS * (steps + 1)),
            processing_class=loaded.tokenizer,
            callbacks=[clock],
        )
        if lengths is not None:
            end_at(lengths, trainer)
        trainer.train()
    return clock.done


def prompts(seed: int, num: int) -> datasets.Dataset:
    """The first tasks that ours are given with that seed."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = load_config([step.write_recipe(folder)], []).config
    stream = TaskStream(tasks.tasks, seed=seed, split="train", rewards=tasks.rewards)
    return datasets.Dataset.from_list(
        [
            {"prompt": [dict(m) for m in task.messages or ()], "columns": json.dumps(task.columns)}
            for task in stream.take(num)
        ]
    )


def scorer() -> Callable[..., list[float]]:
    """The recipe's reward, in TRL's form."""
    score_one = load_reward("reasoning_gym/last_number", ".").score_one

    def reward(completions: list[Any], columns: list[str], **_: Any) -> list[float]:
        items = [
            {"completion": completion[-1]["content"], "columns": json.loads(text)}
            for completion, text in zip(completions, columns, strict=True)
        ]
        return [score_one(item)["score"] for item in items]

    return reward


def scored_in_turn(completions: list[Any], **_: Any) -> list[float]:
    """0 and 1 in turn, as benchmarks/step.py's SCORER."""
    return [float(i % 2) for i in range(len(completions))]


class Ends(LogitsProcessor):
    """Forces the end of each answer [B] at its length, and forbids it before."""

    def __init__(self, lengths_B: torch.Tensor, ends: list[int], prompt_tokens: int) -> None:
        self.lengths_B, self.ends, self.prompt_tokens = lengths_B, ends, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last_B = self.lengths_B.to(scores.device) == input_ids.shape[1] - self.prompt_tokens + 1
        scores = scores.clone()
        scores[:, self.ends] = -torch.inf
        scores[last_B] = -torch.inf
        scores[last_B, self.ends[0]] = 0.0
        return scores


def end_at(lengths: Sequence[Sequence[int]], trainer: Any) -> None:
    """Every answer of the trainer ends at its length, and at nothing else. Rows are grouped by prompt."""
    lengths_B = torch.tensor([length for of_group in lengths for length in of_group])
    generation = trainer.generation_config
    ends = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    plain = trainer.model.generate

    def generate(*args: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        assert len(input_ids) == len(lengths_B), "one call generates a whole step"
        ended = LogitsProcessorList([Ends(lengths_B, ends, input_ids.shape[1])])
        return plain(*args, input_ids=input_ids, logits_processor=ended, **kwargs)

    trainer.model.generate = generate
