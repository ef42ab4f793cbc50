"""What a verb of the command line is, and what several of them share.

Loads nothing heavy: `--help` of every verb answers at once. A verb imports what it works with when it runs.
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

Overrides = list[tuple[str, str]]  # (key of the configuration, its value as it was typed), in order


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """The `arguments` of a verb that has none of its own."""


@dataclass(frozen=True)
class Verb:
    """One verb.

    about: one sentence for `--help`. run(args, overrides): does its work and returns the exit code; a ValueError is
    shown as the user's mistake (exit code 2). arguments(parser): adds its own. files: how many FILE.toml it takes ("":
    none), which are `args.files`. keys: whether `--table.key VALUE` sets a key of the configuration, which
    its help says; where not, one that is given is the user's mistake.
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
    """The configuration that files and overrides make, its notices printed to stderr; the process is prepared for it.
    `supervised`: what `rollover sft` sets lies above the files.

    ConfigError (a ValueError) for what is wrong in it.
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
    """An argument's type: an integer above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number
