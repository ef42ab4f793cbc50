"""`rollover bench step`: whole training steps (generate, score, train) beside TRL's GRPOTrainer on the same work.

Both: the same model and prompts, 8 prompts x 8 samples a step, at most 128 new tokens, bfloat16. Every step of every
system has the same 64 answer lengths: each answer is as long as `answer_lengths` says, whatever the model would have
made of it. Scores alternate between siblings, so that every sample is trained. What differs from step to step is the
machine, and in a partial mode which groups are ready.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import rollover
from rollover.api.session import run_training
from rollover.bench import machine
from rollover.config import Config
from rollover.config.load import load_config
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.models.devices import dtype_of, pick_device
from rollover.models.load import load_model
from rollover.models.team import prepare_process
from rollover.rewards.registry import load_reward
from rollover.tasks.stream import TaskStream
from rollover.track.sinks import read_rows
from rollover.types import Segment

GROUPS, SIZE, NEW_TOKENS = 8, 8, 128
STEPS = 5  # measured steps of each system, at the least
MFU = ("mfu_train", "mfu_generate")


def answer_lengths() -> list[list[int]]:
    """Tokens of each answer of a step [GROUPS][SIZE]: log-normal as SmolLM2's own, median 26, a tenth at the limit."""
    drawn = np.random.default_rng(0).lognormal(np.log(26), 1.24, (GROUPS, SIZE))
    return np.clip(drawn, 2, NEW_TOKENS).astype(int).tolist()


# Siblings score 0 and 1 in turn: a function in TRL's form, for both.
SCORER = "def alternate(prompts, completions, **columns):\n    return [float(i % 2) for i in range(len(completions))]\n"

RECIPE = """
[tasks]
[[tasks.sources]]
kind = "reasoning_gym"
name = "chain_sum"
params = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
[train]
learning_rate = 1e-5
micro_batch_tokens = 2048
[track]
live = "off"
"""
PARTIAL = [("rollout.in_flight_groups", "12"), ("rollout.interrupt", "when_enough"), ("rollout.max_staleness", "1")]


@dataclass(frozen=True)
class Step:
    """What one training step took, the mean score of the samples it trained, their generated tokens, and our MFU."""

    seconds: float
    reward: float
    tokens: int
    mfu: dict[str, float] = field(default_factory=dict)


def run_ours(
    config: Config, overrides: list[tuple[str, str]], steps: int, *, lengths: Sequence[Sequence[int]] | None = None
) -> list[Step]:
    """Train on RECIPE with Rollover; with `lengths` [GROUPS][SIZE] answers are as long in every step, see `run`."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        recipe = _recipe(folder)
        sizes = [("groups_per_step", GROUPS), ("group_size", SIZE), ("max_new_tokens", NEW_TOKENS)]
        overrides = [*((f"rollout.{key}", str(value)) for key, value in sizes), *overrides]
        if lengths is not None:
            overrides = [*overrides, ("rewards.function", _scorer(folder))]
            stack.enter_context(_engine_that_ends_at(lengths))
        values = [("run.dir", f"{folder}/run"), ("train.num_steps", str(steps)), ("model.path", config.model.path),
                  ("model.dtype", config.model.dtype), ("run.threads", str(config.run.threads)),
                  ("checkpoint.every_steps", "0"), ("checkpoint.save_final_model", "false"), *overrides]  # fmt: skip
        run_training(load_config([recipe], values), False)
        rows = read_rows(Path(folder, "run", "metrics.jsonl"))
    return [
        Step(
            row["time/step_s"],
            row["reward/mean"],
            int(row["tokens/step_trained"]),
            {key: row[f"perf/{key}"] for key in MFU if f"perf/{key}" in row},
        )
        for row in rows
    ]


@contextmanager
def _engine_that_ends_at(lengths: Sequence[Sequence[int]]) -> Iterator[None]:
    """Within the block every rollout of an embedded engine ends at its length, and at nothing else."""
    plain = EmbeddedEngine.extend

    async def extend(self: EmbeddedEngine, request: ExtendRequest) -> list[Segment]:
        group, sibling = map(int, request.rollout_id.split("-"))
        left = lengths[group % len(lengths)][sibling] - len(request.generated_ids)
        return await plain(self, replace(request, max_new_tokens=left, stop_token_ids=frozenset()))

    EmbeddedEngine.extend = extend
    try:
        yield
    finally:
        EmbeddedEngine.extend = plain


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
    """Train on RECIPE with TRL's GRPOTrainer; with `autocast` over float32 weights, else in bfloat16 weights.

    `micro_batch`: samples at a time in training; memory grows with it, the gradient stays the same. `lengths`: as for
    `run_ours`.
    """
    import datasets
    import torch
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

    with tempfile.TemporaryDirectory() as folder:
        tasks = load_config([_recipe(folder)], []).config
    stream = TaskStream(tasks.tasks, seed=seed, split="train", rewards=tasks.rewards)
    scorer = load_reward("reasoning_gym/last_number", ".")
    rows = [
        {"prompt": [dict(m) for m in task.messages or ()], "columns": json.dumps(task.columns)}
        for task in stream.take(GROUPS * (steps + 1))
    ]

    def reward(completions: list[Any], columns: list[str], **_: Any) -> list[float]:
        if lengths is not None:
            return [float(i % 2) for i in range(len(completions))]
        items = [
            {"completion": completion[-1]["content"], "columns": json.loads(text)}
            for completion, text in zip(completions, columns, strict=True)
        ]
        return [scorer.score_one(item)["score"] for item in items]

    starts: list[float] = []
    done: list[Step] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            starts.append(time.perf_counter())

        def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            if "reward" in logs:
                tokens = round(logs["completions/mean_length"] * GROUPS * SIZE)
                done.append(Step(time.perf_counter() - starts[-1], float(logs["reward"]), tokens))
                machine.progress(f"TRL: step {len(done)} of {steps}, reward {done[-1].reward:.3f}")

    loaded = load_model(config.model, dtype=torch.float32 if autocast else torch.bfloat16)
    loaded.model.set_attn_implementation("sdpa")
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            bf16=autocast,
            seed=seed,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=GROUPS * SIZE // micro_batch,
            num_generations=SIZE,
            max_completion_length=NEW_TOKENS,
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
            reward_funcs=reward,  # pyright: ignore[reportArgumentType]
            args=arguments,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=loaded.tokenizer,
            callbacks=[Clock()],
        )
        if lengths is not None:
            _end_at(lengths, trainer)
        trainer.train()
    return done


def _end_at(lengths: Sequence[Sequence[int]], trainer: Any) -> None:
    """Every answer of the GRPOTrainer ends at its length, and at nothing else. Rows are grouped by prompt."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    lengths_B = torch.tensor([length for of_group in lengths for length in of_group])
    generation = trainer.generation_config
    ends = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    plain = trainer.model.generate

    class Ends(LogitsProcessor):
        def __init__(self, prompt_tokens: int) -> None:
            self.prompt_tokens = prompt_tokens

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            last_B = lengths_B.to(scores.device) == input_ids.shape[1] - self.prompt_tokens + 1
            scores = scores.clone()
            scores[:, ends] = -torch.inf
            scores[last_B] = -torch.inf
            scores[last_B, ends[0]] = 0.0
            return scores

    def generate(*args: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        assert len(input_ids) == len(lengths_B), "one call generates a whole step"
        ended = LogitsProcessorList([Ends(input_ids.shape[1])])
        return plain(*args, input_ids=input_ids, logits_processor=ended, **kwargs)

    trainer.model.generate = generate


def _recipe(folder: str) -> Path:
    path = Path(folder) / "recipe.toml"
    path.write_text(RECIPE)
    return path


def _scorer(folder: str) -> str:
    """The name of the function that scores where answers have forced lengths."""
    path = Path(folder) / "scorer.py"
    path.write_text(SCORER)
    return f"{path}:alternate"


def run(config: Config, runs: int) -> dict[str, Any]:
    """At least STEPS measured steps of each mode of ours and of TRL, after those that warm up."""
    prepare_process(config)
    device = pick_device(config.model.device)
    versions = machine.describe(device)
    fill = 3  # steps that fill what a partial mode has in flight
    steps, lengths = max(STEPS, runs), answer_lengths()
    times = {
        ("rollover", "synchronous"): run_ours(config, [], 1 + steps, lengths=lengths)[1:],
        ("rollover", "partial, 12 groups in flight"): run_ours(config, PARTIAL, fill + steps, lengths=lengths)[fill:],
    }
    trl_version = None
    try:
        from importlib.metadata import version

        trl_version = version("trl")
        # With float32 weights under bfloat16 autocast, which ours correspond to, it took a fifth longer (docs/log.md).
        setting = "GRPOTrainer, sdpa, generate, 16 a micro-batch, bfloat16 weights"
        times["trl", setting] = run_trl(config, 1 + steps, lengths=lengths)[1:]
    except ImportError:
        pass  # the extra is not installed: ours alone
    results = [
        {
            "case": "step", "system": system, "version": trl_version if system == "trl" else rollover.__version__,
            "setting": setting, "samples_per_s": GROUPS * SIZE / statistics.median(seconds),
            "spread": [GROUPS * SIZE / max(seconds), GROUPS * SIZE / min(seconds)],
            "tokens": [step.tokens for step in steps],
            **{key: statistics.median(of) for key in MFU if (of := [s.mfu[key] for s in steps if key in s.mfu])},
        }
        for (system, setting), steps in times.items()
        for seconds in [[step.seconds for step in steps]]
    ]  # fmt: skip
    sync, partial, *trl = (r["samples_per_s"] for r in results)
    ratios = {"step_vs_trl": partial / trl[0], "step_sync_vs_trl": sync / trl[0]} if trl else {}
    return {
        "benchmark": "step",
        "machine": versions | {"matmul_gflops": machine.matmul_gflops(dtype_of(config), device)},
        "results": results,
        "ratios": ratios,
    }
