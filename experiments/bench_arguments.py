"""The arguments of an experiment that runs one of the benchmarks beside a peer: those of `rollover bench`."""

from __future__ import annotations

import argparse
import sys

from rollover.cli import split_overrides
from rollover.commands import load
from rollover.config import Config


def bench_arguments(about: str) -> tuple[Config, bool]:
    """The configuration (all threads, as `rollover bench` has it), and whether JSON is to be printed."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    rest, overrides = split_overrides(sys.argv[1:], parser)
    args = parser.parse_args(rest)
    return load([], [("run.threads", "0"), *overrides], require_sources=False).config, args.json
