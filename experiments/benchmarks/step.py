"""`rollover bench step`: whole training steps (generate, score, train), synchronous and partial.

8 prompts x 8 samples a step, at most 128 new tokens, bfloat16. Every step has the same 64 answer lengths: each answer
is as long as `answer_lengths` says, whatever the model would have made of it. Scores alternate between siblings, so
that every sample is trained. What differs from step to step is the machine, and in a partial mode which groups are
ready. experiments/step_beside_trl.py runs TRL on the same work.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import rollover
from benchmarks import machine
from rollover.api.session import run_training
from rollover.config import Config
from rollover.config.load import load_config
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.models.devices import dtype_of, pick_device
from rollover.models.threads import prepare_process
from rollover.track.jsonl import read_rows
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
        recipe = write_recipe(folder)
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

    async def extend(self: EmbeddedEngine, request: ExtendRequest, on_token=None, cache_salt="") -> list[Segment]:
        group, sibling = map(int, request.rollout_id.split("-"))
        left = lengths[group % len(lengths)][sibling] - len(request.generated_ids)
        request = replace(request, max_new_tokens=left, stop=StopCriteria())
        return await plain(self, request, on_token, cache_salt)

    EmbeddedEngine.extend = extend
    try:
        yield
    finally:
        EmbeddedEngine.extend = plain


def write_recipe(folder: str) -> Path:
    """RECIPE as a file there."""
    path = Path(folder) / "recipe.toml"
    path.write_text(RECIPE)
    return path


def _scorer(folder: str) -> str:
    """The name of the function that scores where answers have forced lengths."""
    path = Path(folder) / "scorer.py"
    path.write_text(SCORER)
    return f"{path}:alternate"


def run(config: Config, runs: int) -> dict[str, Any]:
    """At least STEPS measured steps of each mode, after those that warm up."""
    prepare_process(config)
    device = pick_device(config.model.device)
    versions = machine.describe(device)
    fill = 3  # steps that fill what a partial mode has in flight
    steps, lengths = max(STEPS, runs), answer_lengths()
    times = {
        "synchronous": run_ours(config, [], 1 + steps, lengths=lengths)[1:],
        "partial, 12 groups in flight": run_ours(config, PARTIAL, fill + steps, lengths=lengths)[fill:],
    }
    results = [result("rollover", rollover.__version__, setting, of) for setting, of in times.items()]
    sync, partial = (r["samples_per_s"] for r in results)
    return {
        "benchmark": "step",
        "machine": versions | {"matmul_gflops": machine.matmul_gflops(dtype_of(config), device)},
        "results": results,
        "ratios": {"step_partial_vs_sync": partial / sync},
    }


def result(system: str, version: str, setting: str, steps: Sequence[Step]) -> dict[str, Any]:
    """What the measured steps of a system say: samples a second by the median step."""
    seconds = [step.seconds for step in steps]
    return {
        "case": "step",
        "system": system,
        "version": version,
        "setting": setting,
        "samples_per_s": GROUPS * SIZE / statistics.median(seconds),
        "spread": [GROUPS * SIZE / max(seconds), GROUPS * SIZE / min(seconds)],
        "tokens": [step.tokens for step in steps],
        **{key: statistics.median(of) for key in MFU if (of := [s.mfu[key] for s in steps if key in s.mfu])},
    }
