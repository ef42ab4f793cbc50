"""The type of a verb of the command line, and helpers of several verbs.

Imports nothing heavy, so that `--help` is fast: a verb imports its libraries when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rollover.logs import FORMATS, terminal

if TYPE_CHECKING:
    from rollover.config.load import Resolved

Overrides = list[tuple[str, str]]  # (key of the configuration, its value as typed), in order


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


@dataclass(frozen=True)
class Verb:
    """One verb.

    about: one sentence for `--help`. run(args, overrides): does the work and returns the exit code; a ValueError is a
    mistake of the user (exit code 2). arguments(parser): adds its own arguments. files: how many FILE.toml it takes
    ("": none), as `args.files`. keys: whether it accepts `--table.key VALUE`.
    """

    about: str
    run: Callable[[argparse.Namespace, Overrides], int]
    arguments: Callable[[argparse.ArgumentParser], None] = no_arguments
    files: Literal["+", "*", ""] = "+"
    keys: bool = True


def shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every verb."""
    text = "how messages are printed: json is one object a line, with time, level, logger and message"
    parser.add_argument("--log-format", choices=FORMATS, help=text)


def load(
    files: Sequence[Path], overrides: Overrides, *, require_sources: bool = True, supervised: bool = False
) -> Resolved:
    """Load the configuration, print its notices to stderr, and prepare the process for its libraries.

    `supervised`: the settings of `rollover sft` override the files. ConfigError (a ValueError) for an invalid one.
    """
    from rollover.config.load import load_config
    from rollover.config.sft import SUPERVISED
    from rollover.processes import prepare_libraries
    from rollover.workflows.distilled import distill_options

    layers = [*files, SUPERVISED] if supervised else list(files)
    resolved = load_config(layers, overrides, require_sources=require_sources, under=distill_options)
    for notice in resolved.notices:
        terminal.info(notice)
    prepare_libraries(resolved.config.run)
    return resolved


def positive(text: str) -> int:
    """Parse an argument: an integer above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number
