"""The verbs of the command line: a table of ours, and those of installed packages.

A verb is a `Verb` (commands/verb.py) in a module. An installed package adds one by an entry point of the group
`rollover.verbs`, `name = "package.module:VERB"`; our names have precedence. A package's module is loaded only when its
verb, or the list of all verbs, is requested.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollover.commands.verb import Verb
from rollover.registry import PLUGINS, imported, package_of, registered

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
        raise ValueError(f"{where} is {verb!r}, not a rollover.commands.verb.Verb")
    try:
        verb.arguments(ArgumentParser())
    except (Exception, SystemExit) as error:  # boundary: another package's function
        raise ValueError(f"{where} fails at its arguments: {type(error).__name__}: {error}") from error
    return verb
