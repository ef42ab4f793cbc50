"""What `rollover bench` runs: our engine and trainer beside a peer and beside what the machine's matmuls allow.

Every benchmark prints one JSON object: machine, versions, `results` (case, system, version, setting, rate, spread) and
`ratios`. Runs alternate between systems; ratios are of medians. Run alone: a busy second process ruins them.
"""

from __future__ import annotations

import json

from rollover.config import Config


def main(what: str, config: Config, *, as_json: bool = False, runs: int = 3) -> int:
    """Run benchmark `what` ("engine" or "train") on the model of `config`; prints the result, returns the exit code."""
    from rollover.bench import engine, train

    report = {"engine": engine.run, "train": train.run}[what](config, runs)
    if as_json:
        print(json.dumps(report, indent=2))
        return 0
    print(f"{report['machine']}")
    for result in report["results"]:
        low, high = result["spread"]
        rate = f"{result['tokens_per_s']:>9.1f} tok/s  [{low:.1f}, {high:.1f}]"
        print(f"  {result['case']:<14} {result['system']:<22} {rate}  {result['setting']}")
    for name, value in report["ratios"].items():
        print(f"  {name} = {value:.2f}")
    return 0
