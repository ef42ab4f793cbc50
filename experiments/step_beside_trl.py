"""Whole training steps beside TRL's GRPOTrainer on the same work: `rollover bench step` and its ratios to TRL.

    .venv/bin/python experiments/step_beside_trl.py [--json]      about 10 minutes on two cores

Every step of every system has the same 64 answer lengths (benchmarks/step.py). Keys of the configuration may be set as
for `rollover bench`. Run it alone.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib.metadata import version
from typing import Any

from bench_arguments import bench_arguments
from benchmarks import show, step
from rollover.config import Config

# With float32 weights under bfloat16 autocast, which ours correspond to, it took a fifth longer (docs/log.md).
SETTING = "GRPOTrainer, sdpa, generate, 16 a micro-batch, bfloat16 weights"
RUNS = 3


def run(config: Config, runs: int, *, micro_batch: int = 16) -> dict[str, Any]:
    """The report of `rollover bench step`, with TRL in it."""
    from trl_peer import run_trl

    report = step.run(config, runs)
    steps = run_trl(config, 1 + max(step.STEPS, runs), micro_batch=micro_batch, lengths=step.answer_lengths())[1:]
    sync, partial = (r["samples_per_s"] for r in report["results"])
    trl = step.result("trl", version("trl"), SETTING, steps)
    ratios = {"step_vs_trl": partial / trl["samples_per_s"], "step_sync_vs_trl": sync / trl["samples_per_s"]}
    return report | {"results": [*report["results"], trl], "ratios": report["ratios"] | ratios}


def main() -> None:
    config, as_json = bench_arguments(__doc__ or "")
    with redirect_stdout(sys.stderr):  # what runs and peers print
        report = run(config, RUNS)
    show(report, as_json=as_json)


if __name__ == "__main__":
    main()
