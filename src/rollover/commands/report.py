"""`rollover report`: the pages of `rollover view` as one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollover.commands.verb import Overrides, Verb
from rollover.commands.view import MOST_RUNS


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dirs", nargs="+", metavar="RUN_DIR", type=Path, help=f"a run's directory; {MOST_RUNS} at most")
    add("--output", "-o", metavar="OUT.html", type=Path, default=Path("report.html"), help="default: report.html")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    if len(args.run_dirs) > MOST_RUNS:
        raise ValueError(f"rollover report takes {MOST_RUNS} runs at most, and these are {len(args.run_dirs)}")
    from rollover.files import atomic_write_text, check_output_file
    from rollover.view.report import make_report
    from rollover.view.run_data import RunData

    check_output_file(args.output, "--output")
    atomic_write_text(args.output, make_report([RunData(directory) for directory in args.run_dirs]))
    print(args.output)
    return 0


VERB = Verb("Write the pages of runs as one file that opens without a network.", run, arguments, files="", keys=False)
