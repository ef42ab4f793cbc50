"""`rollover report`: the pages of `rollover view` as one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollover.commands import Overrides, Verb
from rollover.plugins.dashboard.verbs.view import add_run_dirs, open_runs


def arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dirs(parser)
    parser.add_argument(
        "--output", "-o", metavar="OUT.html", type=Path, default=Path("report.html"), help="default: report.html"
    )


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    from rollover.files import atomic_write_text, check_output_file
    from rollover.plugins.dashboard.report import make_report

    check_output_file(args.output, "--output")
    atomic_write_text(args.output, make_report(open_runs(args.run_dirs)))
    print(args.output)
    return 0


VERB = Verb("Write the pages of runs as one file that opens without a network.", run, arguments, files="", keys=False)
