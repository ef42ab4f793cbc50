"""`rollover bench step`: whole training steps (generate, score, train) beside TRL's GRPOTrainer on the same work.

Both: the same model, tasks, scorer, 8 prompts x 8 samples a step, at most 128 new tokens, bfloat16.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import rollover
from rollover.bench import machine
from rollover.config import Config
from rollover.config.load import load_config
from rollover.envs.tasks.stream import TaskStream
from rollover.models.load import load_model, pick_device
from rollover.rewards.registry import load_reward
from rollover.train.loop import Run
from rollover.train.setup import dtype_of, prepare_process

GROUPS, SIZE, NEW_TOKENS = 8, 8, 128

RECIPE = f"""
[tasks]
[[tasks.sources]]
kind = "reasoning_gym"
name = "chain_sum"
params = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
[rollout]
groups_per_step = {GROUPS}
group_size = {SIZE}
max_new_tokens = {NEW_TOKENS}
[train]
learning_rate = 1e-5
micro_batch_tokens = 2048
[track]
live = "off"
"""
PARTIAL = [("rollout.in_flight_groups", "24"), ("rollout.interrupt", "when_enough"), ("rollout.max_staleness", "2")]


def _ours(config: Config, overrides: list[tuple[str, str]], steps: int) -> list[float]:
    """Seconds of each step but the first three, which fill what a partial mode has in flight."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "step.toml"
        recipe.write_text(RECIPE)
        values = [("run.dir", f"{folder}/run"), ("train.num_steps", str(steps + 3)), ("model.path", config.model.path),
                  ("model.dtype", config.model.dtype), ("run.threads", str(config.run.threads)),
                  ("checkpoint.every_steps", "0"), ("checkpoint.save_final_model", "false"), *overrides]  # fmt: skip
        run = Run(load_config([recipe], values).config, False, [])
        asyncio.run(run.main())
        rows = [json.loads(line) for line in (run.directory.path / "metrics.jsonl").read_bytes().splitlines()]
    return [row["time/step_s"] for row in rows[3:]]


def _trl(config: Config, steps: int) -> list[float]:
    """Seconds of each step but the first."""
    import datasets
    import torch
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

    tasks = load_config([_written(RECIPE)], []).config
    stream = TaskStream(tasks.tasks, seed=0, split="train", rewards=tasks.rewards)
    scorer = load_reward("reasoning_gym/last_number", ".")
    rows = [
        {"prompt": [dict(m) for m in task.messages or ()], "columns": json.dumps(task.columns)}
        for task in stream.take(GROUPS * (steps + 2))
    ]

    def reward(completions: list[Any], columns: list[str], **_: Any) -> list[float]:
        items = [
            {"completion": completion[-1]["content"], "columns": json.loads(text)}
            for completion, text in zip(completions, columns, strict=True)
        ]
        return [scorer.score_one(item)["score"] for item in items]

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    loaded = load_model(config.model, dtype=torch.bfloat16)
    loaded.model.set_attn_implementation("sdpa")
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=GROUPS * SIZE // 16,
            num_generations=SIZE,
            max_completion_length=NEW_TOKENS,
            max_steps=steps + 1,
            learning_rate=1e-5,
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
        trainer.train()
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def _written(text: str) -> Path:
    path = Path(tempfile.mkdtemp()) / "recipe.toml"
    path.write_text(text)
    return path


def run(config: Config, runs: int) -> dict[str, Any]:
    """`runs` measured steps of each mode of ours, one of TRL."""
    prepare_process(config)
    device = pick_device(config.model.device)
    versions = machine.describe(device)
    times = {
        ("rollover", "synchronous"): _ours(config, [], runs),
        ("rollover", "partial, 24 groups in flight"): _ours(config, PARTIAL, runs),
    }
    trl_version = None
    try:
        from importlib.metadata import version

        trl_version = version("trl")
        # With float32 weights under bfloat16 autocast, which ours correspond to, it took a fifth longer (docs/log.md).
        setting = "GRPOTrainer, sdpa, generate, 16 a micro-batch, bfloat16 weights"
        times["trl", setting] = _trl(config, 1)
    except ImportError:
        pass  # the extra is not installed: ours alone
    results = [
        {
            "case": "step", "system": system, "version": trl_version if system == "trl" else rollover.__version__,
            "setting": setting, "samples_per_s": GROUPS * SIZE / statistics.median(seconds),
            "spread": [GROUPS * SIZE / max(seconds), GROUPS * SIZE / min(seconds)],
        }
        for (system, setting), seconds in times.items()
    ]  # fmt: skip
    sync, partial, *trl = (r["samples_per_s"] for r in results)
    ratios = {"step_vs_trl": partial / trl[0], "step_sync_vs_trl": sync / trl[0]} if trl else {}
    return {
        "benchmark": "step",
        "machine": versions | {"matmul_gflops": machine.matmul_gflops(dtype_of(config), device)},
        "results": results,
        "ratios": ratios,
    }
