"""The verbs of the command line: a table of ours, and those of installed packages; helpers of several verbs.

A verb is a `Verb` in a module. An installed package adds one by an entry point of the group `rollover.verbs`,
`name = "package.module:VERB"`; our names have precedence. A package's module is loaded only when its verb, or the list
of all verbs, is requested. Imports nothing heavy, so that `--help` is fast: a verb imports its libraries when it runs.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rollover.logs import FORMATS, terminal
from rollover.registry import PLUGINS, imported, package_of, registered

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from rollover.config.load import Resolved

_MODULES = ("train", "init", "eval", "sample", "config", "plan", "serve", "bench", "completion")
_ORDER = (
    "train", "sft", "demo", "init", "eval", "sample", "config", "convert", "plan", "show", "view", "report", "trace",
    "serve", "bench", "completion",
)  # fmt: skip
_PLACES = {
    **{name: f"rollover.commands.{name}:VERB" for name in _MODULES},
    "sft": "rollover.commands.train:SFT",
    "demo": "rollover.commands.train:DEMO",
    **PLUGINS["verbs"],
}
VERBS = {name: _PLACES[name] for name in _ORDER}
"""module:attribute of each of our verbs, in the order of `--help`."""


Overrides = list[tuple[str, str]]  # (key of the configuration, its value as typed), in order


def no_arguments(parser: ArgumentParser) -> None:
    """Add no arguments."""


@dataclass(frozen=True)
class Verb:
    """One verb.

    about: one sentence for `--help`. run(args, overrides): does the work and returns the exit code; a ValueError is a
    mistake of the user (exit code 2). arguments(parser): adds its own arguments. files: how many FILE.toml it takes
    ("": none), as `args.files`. keys: whether it accepts `--table.key VALUE`.
    """

    about: str
    run: Callable[[Namespace, Overrides], int]
    arguments: Callable[[ArgumentParser], None] = no_arguments
    files: Literal["+", "*", ""] = "+"
    keys: bool = True


def our_verbs() -> dict[str, Verb]:
    """Return the verbs of this package, by name."""
    return {name: imported(place) for name, place in VERBS.items()}


def installed_verbs() -> dict[str, list[EntryPoint]]:
    """Return the verbs of other installed packages, by name, without loading them.

    Where several packages have one name, the first of the list is used: packages are sorted.
    """
    return registered("verbs")


def conflict_notice(points: Sequence[EntryPoint]) -> str:
    """Return the notice about a verb that several packages have."""
    packages = [package_of(point) for point in points]
    return (
        f"several packages bring a verb {points[0].name} ({', '.join(packages)}): {packages[0]}'s is used, the first in"
        " the alphabet. Uninstall it to use another"
    )


def load_verb(point: EntryPoint) -> Verb:
    """Load the verb of another package. ValueError where it cannot be loaded, or is no Verb."""
    where = f"the verb {point.name} ({point.value})"
    try:
        verb = point.load()
    except (Exception, SystemExit) as error:  # boundary: another package's module
        raise ValueError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(verb, Verb):
        raise ValueError(f"{where} is {verb!r}, not a rollover.commands.Verb")
    try:
        verb.arguments(ArgumentParser())
    except (Exception, SystemExit) as error:  # boundary: another package's function
        raise ValueError(f"{where} fails at its arguments: {type(error).__name__}: {error}") from error
    return verb


# Helpers of verbs


def shared_arguments(parser: ArgumentParser) -> None:
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
        raise ArgumentTypeError(f"{text} is not a number above 0")
    return number
