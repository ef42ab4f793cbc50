"""Seconds of a training step, synchronous and fully asynchronous, where something else than the cores is slow.

    python experiments/async_speed.py --case slow_reward     rewards sleep as long as generation and training take
    python experiments/async_speed.py --case remote_engine   an engine elsewhere takes as long as training
    python experiments/async_speed.py --case cpu_bound       neither: generation and training share the cores

A small random model, 8 groups of 8 answers a step. The delay is chosen from synchronous runs and is the same on both
sides; both have two reward workers. Modes take turns; the first steps of each run, which fill what is in flight, are
left out. Run it alone.

The engine elsewhere is a process that computes nothing: each of its tokens is a wait, and what it answers is drawn at
the end. It goes through the product's own socket and weight file (engine/process/). Both sides train with one thread,
and the engine holds no more rollouts at once than a step has.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("src", "tests", "tests/integration")]

import numpy as np  # noqa: E402
import runs  # noqa: E402

import tiny  # noqa: E402
from rollover.api.session import run_training  # noqa: E402
from rollover.config.load import load_config  # noqa: E402
from rollover.engine import build  # noqa: E402
from rollover.engine.process import child  # noqa: E402
from rollover.engine.protocol import ExtendRequest, WeightLoad  # noqa: E402
from rollover.processes import die_with  # noqa: E402
from rollover.types import Segment, StopReason  # noqa: E402

SYNC = {"interrupt": "never", "in_flight_groups": 8}
ASYNC = {"overlap": True, "interrupt": "on_weight_update", "in_flight_groups": 32, "max_staleness": 3,
         "kv_on_resume": "keep"}  # fmt: skip
GROUPS, SIZE, LONGEST = 8, 8, 96
WARM_UP = 4
# Steps of 0.5 s and more: the work of the loop beside the trainer is a small part of them.
MODEL: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
WORKER = "worker"
REWARD = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep({delay})
    return sum(c.isdigit() for c in solution_str) / 48
"""
RATIOS = ("ratio", "ratio_of_medians", "ratio_to_streaming")
TIMES = ("step", "generate", "score", "schedule", "train", "weights", "other")


class Sleeping:
    """An engine of which each token takes `token_s`, for any number of rollouts. The Engine contract, in the worker.

    Lengths are from 12 to LONGEST tokens, as many of each power of two.
    """

    token_s = 0.0
    max_tokens = 4096
    kv_bytes_per_token = 0

    @classmethod
    def over(cls, *_: object) -> Sleeping:
        return cls()

    def __init__(self) -> None:
        self.oldest_version = 0
        self._published: list[tuple[float, int]] = [(0.0, 0)]  # (when, version)
        self._stopped: dict[str, asyncio.Event] = {}
        self._prefilled = 0

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        self._prefilled += len(request.prompt) + len(request.generated_ids)
        length = int(12 * 2 ** (request.seed % 1000 / 333)) - len(request.generated_ids)
        whole = num = min(length, request.max_new_tokens)
        stopped = self._stopped[request.rollout_id] = asyncio.Event()
        began = time.perf_counter()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), whole * self.token_s)
            num = min(whole, int((time.perf_counter() - began) / self.token_s))
        del self._stopped[request.rollout_id]
        stop_reason = StopReason.PAUSED if num < whole else StopReason.EOS if num == length else StopReason.LENGTH
        return self._segments(request, began, num, stop_reason)

    def _segments(self, request: ExtendRequest, began: float, num: int, stop_reason: StopReason) -> list[Segment]:
        first = len(request.generated_ids)
        tokens = np.random.default_rng(request.seed).integers(2, 100, first + num)[first:].astype(np.int32)
        if stop_reason is StopReason.EOS:
            tokens[-1] = min(request.stop.token_ids)
        logprobs = np.full(num, -4.6, dtype=np.float32)
        # The tokens that were made before each new version's weights came.
        cuts = [min(num, max(0, int((when - began) / self.token_s))) for when, _ in self._published] + [num]
        parts = [(a, b, v) for a, b, (_, v) in zip(cuts, cuts[1:], self._published, strict=False) if a < b]
        parts = parts or [(0, 0, self.oldest_version)]
        return [
            Segment(tokens[a:b], logprobs[a:b], v, request.sampling, stop_reason if b == num else StopReason.PAUSED)
            for a, b, v in parts
        ]

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        for rollout_id in list(self._stopped) if rollout_ids is None else rollout_ids:
            if rollout_id in self._stopped:
                self._stopped[rollout_id].set()

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        return {}

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        return self._stopped.keys() & set(rollout_ids)

    def release(self, rollout_ids: Iterable[str]) -> None:
        """Nothing is kept."""

    async def load_weights(self, version: int, tensors: Iterable[object]) -> WeightLoad:
        self.oldest_version = version
        self._published = [*self._published[-8:], (time.perf_counter(), version)]
        return WeightLoad(0, 0.0)

    def use_threads(self, num: int) -> None:
        """It computes nothing."""

    def stats(self) -> dict[str, float]:
        names = ("engine/decode_steps", "engine/prefill_tokens", "engine/reprefill_tokens", "engine/preemptions",
                 "kv/stale_prefix_tokens", "kv/kept_tokens", "kv/shared_prompt_tokens", "kv/bytes")  # fmt: skip
        return dict.fromkeys(names, 0.0) | {"engine/prefill_tokens": self._prefilled}

    async def close(self) -> None:
        self.interrupt()


def serve(parent: str, token_s: str, *arguments: str) -> None:
    """The engine's process: the product's worker over a Sleeping engine."""
    die_with(int(parent))
    Sleeping.token_s = float(token_s)
    with mock.patch.object(build, "EmbeddedEngine", Sleeping):
        child.main(*arguments)


@contextlib.contextmanager
def engine_elsewhere(token_s: float) -> Iterator[None]:
    """Runs start this script as their engine's process."""
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen:
        if (worker := "rollover.engine.process.child") in command:
            words = command[command.index(worker) + 1 :]
            command = [sys.executable, str(Path(__file__).resolve()), WORKER, str(os.getpid()), str(token_s), *words]
        return popen(command, **options)

    with mock.patch.object(subprocess, "Popen", start):
        yield


def run(
    mode: dict[str, Any],
    steps: int,
    *,
    apart: bool,
    threads: int,
    reward_s: float = 0.0,
    streaming: bool = True,
) -> dict[str, float]:
    """Medians over the measured steps of one run, in seconds, and the mean of its whole steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.save(folder / "model", **MODEL)
        recipe = runs.write(
            folder,
            steps=WARM_UP + steps,
            run={"threads": threads},
            rollout={"groups_per_step": GROUPS, "group_size": SIZE, "max_new_tokens": LONGEST, "max_staleness": None,
                     "stop_token_ids": [tiny.tokenizer()(c).input_ids[0] for c in "qx"], **mode},
            engine={"max_running": GROUPS * SIZE, "kv_memory_gb": 0.5, "kind": "process" if apart else "embedded"},
            train={"learning_rate": 1e-5, "micro_batch_tokens": 2048},
            checkpoint={"every_steps": 0, "save_final_model": False},
            track={"live": "off", "rollouts": False},
            rewards={"num_workers": 2, "streaming": streaming, "function": f"{folder / 'slow.py'}:compute_score"},
        )  # fmt: skip
        (folder / "slow.py").write_text(REWARD.format(delay=reward_s))
        with contextlib.redirect_stdout(io.StringIO()):
            run_training(load_config([recipe]), False)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()[WARM_UP:]
    rows = [json.loads(line) for line in lines]
    out = {f"{name}_s": statistics.median(row[f"time/{name}_s"] for row in rows) for name in TIMES}
    out["mean_step_s"] = statistics.mean(row["time/step_s"] for row in rows)
    out["mean_tokens"] = statistics.mean(row["length/mean"] for row in rows)
    out["staleness"] = statistics.mean(row["staleness/mean"] for row in rows)
    return out


def compare(case: str, steps: int, repeats: int, say: Any) -> dict[str, Any]:
    """Both modes in turns. `ratio`: synchronous by asynchronous, of the time of all measured steps; each has as many
    samples. `ratio_of_medians`: of the median step.

    With the slow reward, synchronous training scores a group once it is complete, as it is done elsewhere;
    `ratio_to_streaming`: where it scores each answer when that stops, which hides rewards behind generation too.
    """
    remote, slow = case == "remote_engine", case == "slow_reward"
    threads = 1 if remote else 0
    with engine_elsewhere(1e-6) if remote else contextlib.nullcontext():
        plain = run(SYNC, steps, apart=remote, threads=threads)
    token_s, reward_s = 0.0, 0.0
    if slow:
        reward_s = (plain["generate_s"] + plain["train_s"]) * 2 / (GROUPS * SIZE)  # two workers
    elif remote:
        # A step's longest answer is not known before, and what waits trains a little slower: measured with a delay.
        token_s = plain["train_s"] / LONGEST
        with engine_elsewhere(token_s):
            waiting = run(SYNC, steps, apart=True, threads=threads)
        token_s *= waiting["train_s"] / waiting["generate_s"]
    say({"without delay": plain, "token_s": token_s, "reward_s": reward_s})
    results = []
    with engine_elsewhere(token_s) if remote else contextlib.nullcontext():
        for _ in range(repeats):
            sync = run(SYNC, steps, apart=remote, threads=threads, reward_s=reward_s, streaming=not slow)
            say({"synchronous": sync})
            streamed = run(SYNC, steps, apart=remote, threads=threads, reward_s=reward_s) if slow else sync
            if slow:
                say({"synchronous, streaming": streamed})
            for apart in (True,) if remote else (False, True):
                ahead = run(ASYNC, steps, apart=apart, threads=threads, reward_s=reward_s)
                where = "elsewhere" if remote else "own process" if apart else "same process"
                result = {
                    "engine": where,
                    "ratio": sync["mean_step_s"] / ahead["mean_step_s"],
                    "ratio_of_medians": sync["step_s"] / ahead["step_s"],
                    "ratio_to_streaming": streamed["mean_step_s"] / ahead["mean_step_s"],
                    "synchronous": sync,
                    "asynchronous": ahead,
                }
                results.append(result)
                say(result)
    places = dict.fromkeys(r["engine"] for r in results)
    of = {place: [r for r in results if r["engine"] == place] for place in places}
    summary = {place: {key: statistics.median(r[key] for r in rs) for key in RATIOS} for place, rs in of.items()}
    generate_s = statistics.median(r["synchronous"]["generate_s"] for r in results)
    train_s = statistics.median(r["synchronous"]["train_s"] for r in results)
    return {
        "case": case,
        "token_s": token_s,
        "reward_s": reward_s,
        "generate_by_train": generate_s / train_s,
        "median": summary,
        "runs": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=("slow_reward", "remote_engine", "cpu_bound"))
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a run, after the first ones")
    parser.add_argument("--runs", type=int, default=3, help="runs of each mode, in turns")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing on the way")
    args = parser.parse_args()

    def say(result: dict[str, Any]) -> None:
        if not args.json:
            print(json.dumps(result), flush=True)

    out = compare(args.case, args.steps, args.runs, say)
    print(json.dumps(out if args.json else {k: v for k, v in out.items() if k != "runs"}))


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        serve(*sys.argv[2:])
    else:
        main()
