"""`rollover bench`: measure this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rollover.commands import Overrides, Verb, load


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("engine", "train", "step", "tail", "scale"), help="what to measure")
    parser.add_argument(
        "--lengths",
        choices=("1k", "160k"),
        default="1k",
        help="of tail, the longest answers: 160k runs in virtual time with assumed speeds (docs/planning.md)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    if args.lengths != "1k" and args.what != "tail":
        raise ValueError(f"--lengths {args.lengths}: {args.what} has no lengths to choose. Use it with tail")
    # As in comparisons with other systems: all threads, with the library's own way of waiting.
    resolved = load([], [("run.threads", "0"), *overrides], require_sources=False)
    folder = Path(__file__).parents[3] / "experiments"
    if not (folder / "benchmarks" / "__init__.py").is_file():
        raise ValueError(
            "bench: the benchmarks are in a checkout, not in the package: git clone"
            " https://github.com/rollover-rl/rollover, then `make bench` there"
        )
    sys.path.insert(0, str(folder))
    from benchmarks import main as run_bench

    return run_bench(args.what, resolved.config, as_json=args.json, virtual=args.lengths == "160k")


VERB = Verb("Measure engine, trainer, whole steps, long tails or growth.", run, arguments, files="")
