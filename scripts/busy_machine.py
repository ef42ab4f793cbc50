"""How fast decoding and training stay while other programs want the cores: run.threads = "auto" beside fixed threads.

    python scripts/busy_machine.py                                   alone, beside one busy process, beside two
    python scripts/busy_machine.py --beside 1 --runs 3 --what decode   some of it

64 sequences of SmolLM2-135M are decoded, and micro-batches of it are trained. `fixed` has all threads, which wait for
each other as the OpenMP library lets them (run.threads = 0); `auto` is the default. Each is a process of its own; they
take turns. A busy process is a loop that never sleeps. Before the runs of a load come some unmeasured seconds, in which
auto gets used to it: measured is the speed under a load that stays. Medians, and their ratios to `fixed` alone. Run it
while nothing else runs; it takes nine minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "experiments")]

from rollover.config import Config  # noqa: E402
from rollover.config.load import load_config  # noqa: E402
from rollover.processes import brief_waiting  # noqa: E402
from rollover.types import Prompt  # noqa: E402

if TYPE_CHECKING:
    from rollover.engine.embedded.engine import EmbeddedEngine

THREADS = {"fixed": "0", "auto": "auto"}  # run.threads
KINDS = ("decode", "train")
SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 300
SIBLINGS, ANSWER_TOKENS, MICRO_BATCH_TOKENS = 32, 30, 256  # four micro-batches a step
WORKER = "worker"


class Worker:
    """Engine and trainer over one model, in this process, as a run builds them."""

    def __init__(self, config: Config) -> None:
        from benchmarks import workload
        from local_trainer import local_trainer
        from rollover.engine.build import embedded_engine
        from rollover.models.devices import dtype_of, pick_device
        from rollover.models.load import load_model
        from rollover.models.threads import Team, prepare_process
        from rollover.trainer.batch import Batch

        prepare_process(config)
        device = pick_device(config.model.device)
        loaded = load_model(config.model, device=device)
        vocab = loaded.model.config.get_text_config().vocab_size
        self.engine: EmbeddedEngine = embedded_engine(loaded, config)
        team = Team.from_config(config.run, device)
        self.trainer = local_trainer(
            loaded, config.train, config.algorithm, dtype=dtype_of(config), max_new_tokens=ANSWER_TOKENS, team=team
        )
        self.prompts = [workload.prompt(vocab, PROMPT_TOKENS, i) for i in range(SEQUENCES)]
        samples = workload.samples(vocab, PROMPT_TOKENS, [ANSWER_TOKENS] * SIBLINGS, SIBLINGS)
        self.batch = Batch(samples)

    def decode(self, seconds: float) -> tuple[int, float]:
        """Decode for so long, after the prefill: (tokens, seconds)."""
        return asyncio.run(self._decode(seconds))

    async def _decode(self, seconds: float) -> tuple[int, float]:
        from rollover.engine.protocol import ExtendRequest
        from rollover.types import SamplingParams

        requests = [
            ExtendRequest(str(i), Prompt(prompt_ids), (), NEW_TOKENS, i, SamplingParams(), pause_after=2)
            for i, prompt_ids in enumerate(self.prompts)
        ]
        first = await asyncio.gather(*map(self.engine.extend, requests))
        requests = [
            replace(request, generated_ids=tuple(segments[-1].token_ids.tolist()), pause_after=0)
            for request, segments in zip(requests, first, strict=True)
        ]
        started = time.perf_counter()
        asyncio.get_running_loop().call_later(seconds, self.engine.interrupt)
        answers = await asyncio.gather(*map(self.engine.extend, requests))
        took = time.perf_counter() - started
        self.engine.release(request.rollout_id for request in requests)
        return sum(len(segment.token_ids) for segments in answers for segment in segments), took

    def train(self, seconds: float) -> tuple[int, float]:
        """Training steps for so long: (tokens of the answers, seconds)."""
        started, tokens, took = time.perf_counter(), 0, 0.0
        while took < seconds:
            self.trainer.train_step(self.batch)
            tokens += self.batch.num_loss_tokens
            took = time.perf_counter() - started
        return tokens, took

    def threads(self, kind: str) -> tuple[float, float]:
        """(seconds, thread seconds) of that work so far."""
        if kind == "train":
            return self.trainer.team.seconds, self.trainer.team.thread_seconds
        stats = self.engine.stats()
        return stats["engine/decode_s"], stats["engine/decode_thread_s"]

    def answer(self, kind: str, seconds: float) -> dict[str, float]:
        before = self.threads(kind)
        tokens, took = {"decode": self.decode, "train": self.train}[kind](seconds)
        spent, thread_s = (now - then for now, then in zip(self.threads(kind), before, strict=True))
        return {"tokens_per_s": tokens / took, "threads": thread_s / spent, "seconds": took}


def serve(threads: str, model: str) -> None:
    """The worker's process: `KIND SECONDS` a line."""
    overrides = [("run.threads", threads), ("train.micro_batch_tokens", str(MICRO_BATCH_TOKENS))]
    overrides += [("model.path", model)] if model else []
    config = load_config([], overrides, require_sources=False).config
    os.environ.update(brief_waiting(config.run))
    answers, sys.stdout = sys.stdout, sys.stderr
    worker = Worker(config)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        kind, seconds = line.split()
        print(json.dumps(worker.answer(kind, float(seconds))), file=answers, flush=True)


class Workers:
    """One process for each way, asked in turn: the others sleep."""

    def __init__(self, model: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        self._processes = {
            way: subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), WORKER, threads, model],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for way, threads in THREADS.items()
        }  # fmt: skip
        for process in self._processes.values():
            assert process.stdout is not None and process.stdout.readline() == "ready\n", "a worker did not start"

    def ask(self, way: str, kind: str, seconds: float) -> dict[str, float]:
        process = self._processes[way]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{kind} {seconds}\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@contextmanager
def busy(num: int) -> Iterator[None]:
    """So many processes that never sleep, at the usual priority."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(args: argparse.Namespace, say: Any) -> list[dict[str, Any]]:
    """One result for each load, kind of work and way: tokens/s of each run, and threads."""
    workers = Workers(args.model)
    found: dict[tuple[int, str, str], list[dict[str, float]]] = {}
    try:
        for num in args.beside:
            with busy(num):
                for kind in args.what:
                    for way in THREADS:
                        settling = workers.ask(way, kind, args.settle_s if way == "auto" else 0.1)
                        say({"beside": num, "what": kind, "way": way, "unmeasured": settling})
                for _ in range(args.runs):
                    for kind in args.what:
                        for way in THREADS:
                            result = workers.ask(way, kind, args.seconds)
                            found.setdefault((num, kind, way), []).append(result)
                            say({"beside": num, "what": kind, "way": way, **result})
    finally:
        workers.close()
    return [
        {
            "beside": num, "what": kind, "way": way,
            "tokens_per_s": statistics.median(r["tokens_per_s"] for r in results),
            "runs": [r["tokens_per_s"] for r in results],
            "threads": statistics.median(r["threads"] for r in results),
        }
        for (num, kind, way), results in found.items()
    ]  # fmt: skip


def ratios(results: list[dict[str, Any]]) -> dict[str, float]:
    """Each median by that of `fixed` alone, if that was measured."""
    rates = {(r["what"], r["beside"], r["way"]): r["tokens_per_s"] for r in results}
    return {
        f"{kind}_{way}_beside_{num}": rate / rates[kind, 0, "fixed"]
        for (kind, num, way), rate in rates.items()
        if (kind, 0, "fixed") in rates
    }


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 1, 2], help="numbers of busy processes")
    parser.add_argument("--what", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each, in turn")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one run")
    parser.add_argument("--settle-s", type=float, default=15.0, help="auto's unmeasured seconds under each load")
    parser.add_argument("--model", default="", help="in place of SmolLM2")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing on the way")
    return parser.parse_args(words)


def main() -> None:
    args = arguments()

    def say(result: dict[str, Any]) -> None:
        if not args.json:
            print(json.dumps(result), flush=True)

    results = measure(args, say)
    print(json.dumps({"cores": os.cpu_count(), "results": results, "ratios": ratios(results)}))


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        serve(*sys.argv[2:])
    else:
        main()
