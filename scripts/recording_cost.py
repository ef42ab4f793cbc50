"""What recording a step costs, and how soon all of a run is known again, in seconds of the processor.

python scripts/recording_cost.py [--rollouts 64] [--tokens 400] [--steps 20]
python scripts/recording_cost.py --train smollm2-135m [--rollouts 8] [--tokens 60] [--steps 3]
    what of a training step on that model is for track.token_stats: its loss telling it, its being gathered and written
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollover.plugins.dashboard.rollout_index import RolloutIndex
from rollover.track.parquet import MetricsTable
from rollover.track.records import FORMATS, RolloutRecorder
from rollover.track.token_stats import TokenStats
from rollover.track.tracker import RecordedGroup
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, SamplingParams, Segment, StopReason, Task

GROUP_SIZE, KEYS = 8, 300


def stats(size: int, random: np.random.Generator) -> TokenStats:
    """Of a token each number that it may have, and no two alike."""
    numbers = random.lognormal(0.0, 0.3, (3, size)).astype(np.float32)
    return TokenStats(np.ones(size, bool), np.zeros(size, bool), np.full(size, 0.5, np.float32), *numbers)


def segment(size: int, random: np.random.Generator, vocab: int) -> Segment:
    token_ids = random.integers(0, vocab, size, dtype=np.int32)
    logprobs = -random.exponential(0.5, size).astype(np.float32)
    return Segment(token_ids, logprobs, 0, SamplingParams(), StopReason.EOS, True)


def groups(
    rollouts: int, tokens: int, first: int, random: np.random.Generator, vocab: int = 150_000
) -> list[RecordedGroup]:
    told = []
    for n in range(first, first + max(1, rollouts // GROUP_SIZE)):
        task = Task(f"task-{n}", "sums", "own", messages=({"role": "user", "content": "What is it? " * 20},))
        each = []
        for sibling in range(GROUP_SIZE):
            cut = int(random.integers(1, tokens))
            parts = [segment(size, random, vocab) for size in (cut, tokens - cut)]
            reward = Reward(float(random.integers(2)))
            each.append(Rollout(n, sibling, task, parts, RolloutState.CONSUMED, StopReason.EOS, reward))
        texts = ["some words of an answer " * (tokens // 6) for _ in each]
        of_tokens = [stats(tokens, random) for _ in each]
        told.append(
            RecordedGroup(Group(n, task, Prompt.of(range(100)), each), texts, [0.5] * len(each), tokens=of_tokens)
        )
    return told


def seconds(work: Callable[[], object]) -> float:
    """Of the processor: what a busy machine does not change."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


class Watch:
    """Adds up the processor's seconds of the functions that it stands around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - begun

        setattr(owner, name, timed)


def train(model: str, rollouts: int, tokens: int, steps: int) -> None:
    """Steps with token_stats, and what of them is for that."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))
    from local_trainer import build_batch, local_trainer
    from rollover.config import AlgorithmConfig, ModelConfig, TrainConfig
    from rollover.models.load import load_model
    from rollover.trainer import objective
    from rollover.trainer.trainer import TokenStatsCollector

    algorithm = AlgorithmConfig.model_validate({"correction": "token_truncate", "proximal": "step_start"})
    loaded = load_model(ModelConfig(path=model))
    trainer = local_trainer(
        loaded, TrainConfig(num_steps=steps), algorithm, dtype=torch.float32, max_new_tokens=tokens, tells_tokens=True
    )
    vocab = min(100, loaded.vocab_size)
    without = [replace(of, tokens=()) for of in groups(rollouts, tokens, 0, np.random.default_rng(0), vocab)]
    batch = build_batch([of.group for of in without], algorithm)
    told, gathered, whole, written = Watch(), Watch(), Watch(), 0.0
    told.around(objective, "token_stats_of")
    gathered.around(TokenStatsCollector, "stats")
    whole.around(trainer, "train_step")
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, steps + 1):
            trainer.train_step(batch)
            found = [[trainer.token_stats.get(r.rollout_id) for r in of.group.rollouts] for of in without]
            with_all = [replace(of, tokens=tokens) for of, tokens in zip(without, found, strict=True)]
            written += seconds(partial(RolloutRecorder(Path(folder, "with")).write, step, with_all))
            written -= seconds(partial(RolloutRecorder(Path(folder, "without")).write, step, without))
    share = (told.seconds + gathered.seconds + written) / whole.seconds
    print(
        f"{model}, {rollouts} x {tokens}: training {whole.seconds / steps:.3f} s;"
        f" told {told.seconds / steps * 1e3:.2f} ms, gathered {gathered.seconds / steps * 1e3:.2f} ms,"
        f" written {written / steps * 1e3:.2f} ms a step:"
        f" {share:.2%} of the training alone"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rollouts", 64), ("tokens", 400), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--train", metavar="MODEL")
    args = parser.parse_args()
    if args.train:
        train(args.train, args.rollouts, args.tokens, args.steps)
        return
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        with_all = groups(args.rollouts, args.tokens, 0, random)
        without = [replace(of, tokens=()) for of in with_all]
        for name, told in itertools.product(FORMATS, (False, True)):
            of_step = with_all if told else without
            recorder = RolloutRecorder(Path(folder, f"{name}-{told}"), formats=[name])
            took = []
            for step in range(1, args.steps + 1):
                took.append(seconds(partial(recorder.write, step, of_step)))
            size = sum(file.stat().st_size for file in recorder.dir.iterdir()) / args.steps
            index = RolloutIndex(recorder.dir)
            looked = seconds(index.entries)
            read = seconds(lambda index=index: index.record(index.entries()[-1]))
            again = seconds(index.entries)
            print(
                f"{name:8}{' with token_stats' if told else ''} a step of {args.rollouts} x {args.tokens}:"
                f" {np.median(took) * 1e3:.1f} ms,"
                f" {size / 1e6:.2f} MB; index of {len(index.entries())}: {looked:.2f} s,"
                f" {index.entries().nbytes / 1e6:.1f} MB, again {again * 1e3:.0f} ms; one record {read * 1e3:.1f} ms"
            )
        table = MetricsTable(Path(folder, "metrics.parquet"), Path(folder, "metrics.jsonl"), lambda: 0.0)
        row = {f"own/{n}": float(n) for n in range(KEYS)}
        for step in range(1, 1001):
            took = seconds(lambda step=step: table.on_step({"step": step, **row}))  # the clock stands: always written
            if step in (1, 100, 1000):
                print(f"metrics.parquet of {step} steps of {KEYS} keys: {took * 1e3:.1f} ms, paused for 500 times that")
    print(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB of memory")


if __name__ == "__main__":
    main()
