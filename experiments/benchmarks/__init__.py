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


def main(what: str, config: Config, *, as_json: bool = False, runs: int = 3, virtual: bool = False) -> int:
    """Run benchmark `what` on the model of `config`; prints the result, returns the exit code.

    `virtual`: of tail, answers of up to 160,000 tokens in virtual time, without a model.
    """
    from importlib import import_module

    # What runs and peers print belongs to stderr: stdout holds one JSON object.
    with redirect_stdout(sys.stderr):
        module = import_module(f"benchmarks.{what}")
        report = module.run_160k() if virtual else module.run(config, runs)
    show(report, as_json=as_json)
    return 0


def show(report: dict[str, Any], *, as_json: bool = False) -> None:
    """Print a report."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print(f"{report['machine']}")
    for result in report["results"]:
        unit = "tokens_per_s" if "tokens_per_s" in result else "samples_per_s"
        rate = f"{result[unit]:>9.2f} {unit.replace('_per_s', '/s')}"
        if "spread" in result:  # not in virtual time
            low, high = result["spread"]
            rate += f"  [{low:.2f}, {high:.2f}]"
        if "step_s" in result:
            rate += f"  {result['step_s']:.0f} s/step"
        memory = f"  {result['peak_memory_gb']:.2f} GB" if result.get("peak_memory_gb") else ""
        mfu = "".join(f"  {key} {result[key]:.2f}" for key in ("mfu", "mfu_train", "mfu_generate") if key in result)
        print(f"  {result['case']:<18} {result['system']:<22} {rate}{memory}{mfu}  {result['setting']}")
    for name, value in report["ratios"].items():
        print(f"  {name} = {value:.2f}")
