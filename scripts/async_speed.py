"""Seconds of a training step, synchronous and fully asynchronous, where something else than the cores is slow.

    .venv/bin/python scripts/async_speed.py reward     a reward sleeps about as long as generation and training take
    .venv/bin/python scripts/async_speed.py engine     the engine is elsewhere: a step of it is a wait
    .venv/bin/python scripts/async_speed.py cpu        neither: generation and training share the cores

A tiny random model, 8 groups of 8 answers a step. The delay is chosen from a run without it, printed, and the same on
both sides; both have two reward workers. Modes take turns; the first steps of each run, which fill what is in flight,
are left out. Run it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("src", "tests", "tests/integration")]

SYNC = {"interrupt": "never", "in_flight_groups": 8}
ASYNC = {"overlap": True, "interrupt": "on_weight_update", "in_flight_groups": 32, "max_staleness": 3,
         "kv_on_resume": "keep"}  # fmt: skip
WARM_UP = 4
REWARD = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep({delay})
    return sum(c.isdigit() for c in solution_str) / 48
"""


def run(mode: dict[str, Any], steps: int, *, process: bool, reward_s: float = 0.0, engine_s: float = 0.0) -> dict:
    """Medians over the measured steps of one run, in seconds."""
    import runs

    import tiny
    from rollover.config.load import load_config
    from rollover.engine.fake import FakeEngine
    from rollover.train import setup
    from rollover.train.loop import Run

    class Elsewhere(FakeEngine):
        """Each decode step of it is a wait of `engine_s`."""

        max_tokens = 4096

        def use_threads(self, num: int) -> None:
            """It has cores of its own."""

        async def _run(self) -> None:
            while self._running:
                await asyncio.sleep(engine_s)
                self._step()

    embedded = setup.embedded_engine
    if engine_s:
        # Lengths from 12 to 96 tokens, as many of each power of two.
        def length(seed: int) -> int:
            return int(12 * 2 ** (seed % 1000 / 333))

        setup.embedded_engine = lambda *_: Elsewhere(length, vocab_size=100)  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            unset = dict.fromkeys(("groups_per_step", "group_size", "max_new_tokens", "in_flight_groups", "interrupt"))
            recipe = runs.write(
                folder,
                steps=WARM_UP + steps,
                run={"threads": None},
                rollout=unset | {"groups_per_step": 8, "group_size": 8, "max_new_tokens": 96, "max_staleness": None,
                                 "stop_token_ids": [tiny.tokenizer()(c).input_ids[0] for c in "qx"], **mode},
                engine={"max_running": 256, "kv_memory_gb": 0.5, "process": process},
                train={"learning_rate": 1e-5, "micro_batch_tokens": 2048},
                checkpoint={"every_steps": 0, "save_final_model": False},
                track={"live": "off", "rollouts": False},
                rewards={"num_workers": 2, "function": f"{folder / 'slow.py'}:compute_score"},
            )  # fmt: skip
            (folder / "slow.py").write_text(REWARD.format(delay=reward_s))
            with contextlib.redirect_stdout(io.StringIO()):
                asyncio.run(Run(load_config([recipe]).config, False, []).main())
            rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    finally:
        setup.embedded_engine = embedded
    keys = ("time/step_s", "time/generate_s", "time/score_s", "time/train_s", "length/mean")
    out = {key: statistics.median(row[key] for row in rows) for key in keys}
    out["mean_step_s"] = statistics.mean(row["time/step_s"] for row in rows)
    out["staleness"] = statistics.mean(row["staleness/mean"] for row in rows)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("reward", "engine", "cpu"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    delays: dict[str, float] = {}
    plain = run(SYNC, args.steps, process=False)
    work_s = plain["time/generate_s"] + plain["time/train_s"]
    if args.what == "reward":
        delays["reward_s"] = work_s * 2 / 64  # 64 answers, two workers
    elif args.what == "engine":
        delays["engine_s"] = plain["time/train_s"] / 96  # the longest answer takes as long as training
    print(json.dumps({"without delay": plain, **delays}), flush=True)
    ratios = {"inline": [], "process": []}
    for _ in range(args.runs):
        sync = run(SYNC, args.steps, process=False, **delays)
        print(json.dumps({"synchronous": sync}), flush=True)
        for place in ("inline",) if args.what == "engine" else ("inline", "process"):
            ahead = run(ASYNC, args.steps, process=place == "process", **delays)
            ratios[place].append(sync["mean_step_s"] / ahead["mean_step_s"])
            print(json.dumps({f"asynchronous, {place}": ahead, "ratio": ratios[place][-1]}), flush=True)
    print(json.dumps({place: sorted(values) for place, values in ratios.items() if values}))


if __name__ == "__main__":
    main()
