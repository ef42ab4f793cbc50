"""What a tool of others is told of a run, and how: `Adapter`, which each of them extends in a file of its own.

A tool works in a process of its own (child.py), so it may wait, fail and import what it likes. Owns what all of them
share: what a row's numbers are called.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus

from rollover.text import named
from rollover.track.tracker import Cut, Row, Tracker

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_LEAST_SECRET = 8  # characters: shorter values are words such as "true"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_NOT_IN_PATHS = re.compile(r"[^\w\-. :/]|(?<![^/])\.*(?![^/])", re.ASCII)  # also a part that is "", . or ..
_IN_ADDRESS = re.compile(r"(?<=://)\S+(?=@)")  # a password may have what ends one


@dataclass(frozen=True, slots=True)
class About:
    """The run that a tool shows. `id`: the same over all processes of the run. `project`, `group`, `entity`: "" where
    none is chosen. `config`: by table, without credentials."""

    id: str
    name: str
    directory: Path
    project: str
    group: str
    entity: str
    tags: Sequence[str]
    config: Mapping[str, Any]

    @property
    def file_name(self) -> str:
        """Name and id as a file, or an artifact, may be called: letters, digits, dots, underscores and hyphens."""
        return f"{_NOT_IN_NAMES.sub('-', self.name).strip('.-') or 'run'}-{self.id}"

    def project_or(self, variable: str) -> str:
        """The project that is chosen, or that the environment's `variable` names, or "rollover"."""
        return self.project or os.environ.get(variable) or "rollover"


class LastSteps(NamedTuple):
    """The last_steps steps that a tool has a row and an evaluation of; -1: none."""

    row: int = -1
    eval: int = -1


class Adapter(Tracker):
    """A tracker of others. `truncate` opens it, or opens it again, and sets `last_steps`: what is after that is told
    from the run's own files. Whatever it raises is reported, and tried again with the next step."""

    def __init__(self, about: About) -> None:
        self.about, self.last_steps = about, LastSteps()
        self.place = ""
        """Where it shows the run, once it is open: an address or a folder."""
        self.failed = False
        """Whether the run ended by an error, when it is closed."""

    def truncate(self, cut: Cut) -> None:
        raise NotImplementedError

    def on_step(self, row: Row) -> None:
        self.log(row["step"], numbers_of(row))

    def on_eval(self, row: Mapping[str, Any]) -> None:
        self.log(row["step"], numbers_of_eval(row))

    def log(self, step: Any, numbers: Mapping[str, float]) -> None:
        """What was measured in a step, or in the evaluation after it."""
        raise NotImplementedError

    def show(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A sample, of rows that have the same keys. name: "rollouts", which left the run with `step`, or "answers" of
        the evaluation after it. A tool that shows no texts does nothing."""

    def on_artifact(self, name: str, files: Mapping[str, Path]) -> None:
        """What the finished run leaves as `name` (track.artifacts): its files by their paths in it. Once they are where
        they belong, it returns. A tool that keeps no files does nothing."""


def numbers_of(row: Row) -> dict[str, float]:
    """What a step's row measures, by key; None is no measurement. "policy_version" is the last: it says that the row is
    whole, where a tool takes one number after the other."""
    found = {named(key): value for key, value in row.items() if value is not None and key != "step"}
    return _last(found, "policy_version")


def numbers_of_eval(row: Mapping[str, Any]) -> dict[str, float]:
    """What an evaluation measures: eval/mean, eval/ci/0, eval/sources/NAME/mean ..., and last "eval/policy_version"."""
    numbers = {key: value for key, value in flat(row).items() if isinstance(value, int | float)}
    found = {f"eval/{named(key)}": value for key, value in numbers.items()}  # a source may be called anything
    return _last(found, "eval/policy_version")


def _last(numbers: Mapping[str, float], key: str) -> dict[str, float]:
    others = {name: value for name, value in numbers.items() if name != key}
    return others | ({key: numbers[key]} if key in numbers else {})


def flat(values: Mapping[str, Any] | Sequence[Any], under: str = "") -> dict[str, Any]:
    """Every leaf of tables and lists, by the keys on the way to it, joined by slashes."""
    found: dict[str, Any] = {}
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
    for key, value in pairs:
        if isinstance(value, Mapping | list | tuple):
            found |= flat(value, f"{under}{key}/")
        elif value is not None:
            found[f"{under}{key}"] = value
    return found


def as_paths(values: Mapping[str, Any], most: int) -> dict[str, Any]:
    """The values by names that can be paths of files, of `most` characters: what else is in a name, and parts such as
    .. are _, and a name that would also be the folder of another ends with _."""
    names = {key: _NOT_IN_PATHS.sub("_", key) for key in values}
    names = {key: of if len(of) <= most else f"{of[:100]}...{of[103 - most :]}" for key, of in names.items()}
    parts = [name.split("/") for name in names.values()]
    folders = {"/".join(of[:n]) for of in parts for n in range(1, len(of))}
    return {f"{name}_" if name in folders else name: values[key] for key, name in names.items()}


def redacted(text: str) -> str:
    """The text without what variables of the environment hold that are named as secrets are, and without the user and
    password of an address."""
    for form in sorted({form for value in secrets() for form in _forms(value)}, key=len, reverse=True):
        text = text.replace(form, "***")
    return _IN_ADDRESS.sub("***", text)


def _forms(value: str) -> set[str]:
    """As it may stand in a message: as it is, as a part of an address, in JSON or as Python shows it, on one line."""
    return {
        value,
        quote(value, safe=""),
        quote_plus(value),
        json.dumps(value)[1:-1],
        repr(value)[1:-1],
        " ".join(value.split()),
    }


def secrets() -> list[str]:
    """What variables of the environment hold that are named as secrets are."""
    return [value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= _LEAST_SECRET]


def without_secrets(value: Any) -> Any:
    """A JSON value with each of its strings `redacted`."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: without_secrets(item) for key, item in value.items()}
    return [without_secrets(item) for item in value] if isinstance(value, list | tuple) else value
