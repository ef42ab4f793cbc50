"""What `rollover bench` runs: our engine and trainer beside transformers and beside what the machine's matmuls allow.

Every benchmark prints one JSON object: machine, versions, `results` (case, system, version, setting, rate, spread, and
of our engine and trainer the share of the machine's peak that they reach, "mfu": models/flops.py) and
`ratios` (of medians). Engine and trainer benchmarks take turns with their peers. Run alone: a busy second process
ruins them. What runs beside TRL and vLLM is in experiments/, outside the package.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Any

from rollover.config import Config


def main(what: str, config: Config, *, as_json: bool = False, runs: int = 3) -> int:
    """Run benchmark `what` on the model of `config`; prints the result, returns the exit code."""
    from importlib import import_module

    # What runs and peers print belongs to stderr: stdout holds one JSON object.
    with redirect_stdout(sys.stderr):
        report = import_module(f"rollover.bench.{what}").run(config, runs)
    show(report, as_json=as_json)
    return 0


def show(report: dict[str, Any], *, as_json: bool = False) -> None:
    """Print a report."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print(f"{report['machine']}")
    for result in report["results"]:
        low, high = result["spread"]
        unit = "tokens_per_s" if "tokens_per_s" in result else "samples_per_s"
        rate = f"{result[unit]:>9.2f} {unit.replace('_per_s', '/s')}  [{low:.2f}, {high:.2f}]"
        memory = f"  {result['peak_memory_gb']:.2f} GB" if result.get("peak_memory_gb") else ""
        mfu = "".join(f"  {key} {result[key]:.2f}" for key in ("mfu", "mfu_train", "mfu_generate") if key in result)
        print(f"  {result['case']:<18} {result['system']:<22} {rate}{memory}{mfu}  {result['setting']}")
    for name, value in report["ratios"].items():
        print(f"  {name} = {value:.2f}")
