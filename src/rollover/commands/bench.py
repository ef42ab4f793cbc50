"""`rollover bench`: measure this machine."""

from __future__ import annotations

import argparse

from rollover.commands.verb import Overrides, Verb, load


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("engine", "train", "step", "tail", "scale"), help="what to measure")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    # Measured alone, beside peers: all threads, which wait as the library does.
    resolved = load([], [("run.threads", "0"), *overrides], require_sources=False)
    from rollover.bench import main as run_bench

    return run_bench(args.what, resolved.config, as_json=args.json)


VERB = Verb("Measure engine, trainer, whole steps, long tails or growth.", run, arguments, files="")
