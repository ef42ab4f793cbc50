"""What recording a step costs, and how soon all of a run is known again, in seconds of the processor.

python scripts/recording_cost.py [--rollouts 64] [--tokens 400] [--steps 20]
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rollover.reading.rollout_index import RolloutIndex
from rollover.track.metrics_table import MetricsTable
from rollover.track.recorder import FORMATS, RolloutRecorder
from rollover.track.tracker import RecordedGroup
from rollover.types import Group, Reward, Rollout, RolloutState, SamplingParams, Segment, StopReason, Task

GROUP_SIZE, KEYS = 8, 300


def segment(size: int, random: np.random.Generator) -> Segment:
    token_ids = random.integers(0, 150_000, size, dtype=np.int32)
    logprobs = -random.exponential(0.5, size).astype(np.float32)
    return Segment(token_ids, logprobs, 0, SamplingParams(), StopReason.EOS, True)


def groups(rollouts: int, tokens: int, first: int, random: np.random.Generator) -> list[RecordedGroup]:
    told = []
    for n in range(first, first + max(1, rollouts // GROUP_SIZE)):
        task = Task(f"task-{n}", "sums", "own", messages=({"role": "user", "content": "What is it? " * 20},))
        each = []
        for sibling in range(GROUP_SIZE):
            cut = int(random.integers(1, tokens))
            parts = [segment(size, random) for size in (cut, tokens - cut)]
            reward = Reward(float(random.integers(2)))
            each.append(Rollout(n, sibling, task, parts, RolloutState.CONSUMED, StopReason.EOS, reward))
        texts = ["some words of an answer " * (tokens // 6) for _ in each]
        told.append(RecordedGroup(Group(n, task, tuple(range(100)), each), texts, [0.5] * len(each)))
    return told


def seconds(work: Callable[[], object]) -> float:
    """Of the processor: what a busy machine does not change."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rollouts", 64), ("tokens", 400), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        of_step = groups(args.rollouts, args.tokens, 0, random)
        for name in FORMATS:
            recorder = RolloutRecorder(Path(folder, name), formats=[name])
            took = []
            for step in range(1, args.steps + 1):
                took.append(seconds(lambda recorder=recorder, step=step: recorder.write(step, of_step)))
            size = sum(file.stat().st_size for file in recorder.dir.iterdir()) / args.steps
            index = RolloutIndex(recorder.dir)
            looked = seconds(index.entries)
            read = seconds(lambda index=index: index.record(index.entries()[-1]))
            again = seconds(index.entries)
            print(
                f"{name:8} a step of {args.rollouts} x {args.tokens}: {np.median(took) * 1e3:.1f} ms,"
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
