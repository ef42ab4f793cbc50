"""`rollover convert`: another system's configuration, as TOML with the other's option behind each key."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollover.commands import Overrides, Verb
from rollover.logs import terminal


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "file",
        metavar="FILE",
        type=Path,
        help="a launch script of verl, LightRFT or TRL (.sh), a YAML of verl, Axolotl or TRL, or a script that makes"
        " TRL's GRPOTrainer (.py)",
    )
    add(
        "--from",
        dest="system",
        choices=("verl", "axolotl", "lightrft", "trl"),
        default="",
        help="the system that FILE is of, where its content does not tell",
    )
    add(
        "--accept",
        metavar="OPTION",
        action="append",
        default=[],
        help="leave out this option of the other system, though it changes what is learned (may be repeated)",
    )


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    from rollover.plugins.convert.conversion import convert_file

    text, notices = convert_file(args.file, overrides, args.accept, args.system)
    for notice in notices:
        terminal.info(notice)
    print(text, end="")
    return 0


VERB = Verb(
    "Print another system's configuration as TOML, and what of it has no counterpart.", run, arguments, files=""
)
