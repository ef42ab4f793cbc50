"""The verbs of the command line: a table of their names, and how one of another package enters.

A verb is a `Verb` (commands/verb.py) that stands in a module of its own. Ours are those of VERBS. An installed package
adds one by an entry point of the group `rollover.verbs`, `name = "package.module:VERB"`; a name of ours stays ours.
Owns who is asked for which name. No module of another package is loaded before its verb, or the list of all, is wanted.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollover.commands.verb import Verb
from rollover.registry import PLUGINS, imported, package_of, registered

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_CORE = ("train", "sft", "demo", "init", "eval", "sample", "config", "plan", "serve", "bench", "completion")
_ORDER = (
    "train", "sft", "demo", "init", "eval", "sample", "config", "convert", "plan", "show", "view", "report", "trace",
    "serve", "bench", "completion",
)  # fmt: skip
_PLACES = {name: f"rollover.commands.{name}:VERB" for name in _CORE} | PLUGINS["verbs"]
VERBS = {name: _PLACES[name] for name in _ORDER}
"""module:attribute of each of our verbs, in the order of `--help`."""


def our_verbs() -> dict[str, Verb]:
    """The verbs of this package, by name."""
    return {name: imported(place) for name, place in VERBS.items()}


def installed_verbs() -> dict[str, list[EntryPoint]]:
    """The verbs of other installed packages, by name; none of them is loaded.

    Where several packages bring one name, the first of the list has it: the package that comes first in the alphabet.
    """
    return registered("verbs")


def who_has_it(points: Sequence[EntryPoint]) -> str:
    """What to tell the user of a verb that several packages bring."""
    packages = [package_of(point) for point in points]
    return (
        f"several packages bring a verb {points[0].name} ({', '.join(packages)}): {packages[0]}'s is used, the first in"
        " the alphabet. Uninstall it to use another"
    )


def load_verb(point: EntryPoint) -> Verb:
    """The verb of another package. ValueError where it cannot be loaded, or is no Verb."""
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
