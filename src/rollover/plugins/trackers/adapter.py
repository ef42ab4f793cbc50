"""`Adapter`, the base class of the adapters of external trackers, and what they share: names, numbers, redaction.

An adapter runs in a process of its own (child.py), so it may block, fail and import anything.
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
_IN_ADDRESS = re.compile(r"(?<=://)\S+(?=@)")  # a password may contain any character


@dataclass(frozen=True, slots=True)
class About:
    """The run, for an adapter. `id`: constant over all processes of the run. `project`, `group`, `entity`: "" if not
    set. `config`: by table, without credentials."""

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
        """Name and id as a file name: letters, digits, dots, underscores and hyphens."""
        return f"{_NOT_IN_NAMES.sub('-', self.name).strip('.-') or 'run'}-{self.id}"

    def project_or(self, variable: str) -> str:
        """Return the configured project, else that of the environment `variable`, else "rollover"."""
        return self.project or os.environ.get(variable) or "rollover"


class LastSteps(NamedTuple):
    """The last steps with a row and with an evaluation in a tracker; -1: none."""

    row: int = -1
    eval: int = -1


class Adapter(Tracker):
    """Base class of adapters. `truncate` opens the tracker (again) and sets `last_steps`; later rows then come from the
    run's files. Exceptions are reported, and the call is retried with the next step."""

    def __init__(self, about: About) -> None:
        self.about, self.last_steps = about, LastSteps()
        self.place = ""
        """Address or folder of the run there, once it is open."""
        self.failed = False
        """Set before `close`: whether the run ended by an error."""

    def truncate(self, cut: Cut) -> None:
        raise NotImplementedError

    def on_step(self, row: Row) -> None:
        self.log(row["step"], numbers_of(row))

    def on_eval(self, row: Mapping[str, Any]) -> None:
        self.log(row["step"], numbers_of_eval(row))

    def log(self, step: Any, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step, or of the evaluation after it."""
        raise NotImplementedError

    def show(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a sample as rows with equal keys. name: "rollouts" of `step`, or "answers" of the evaluation after it.

        A tracker without texts does nothing.
        """

    def on_artifact(self, name: str, files: Mapping[str, Path]) -> None:
        """Upload the artifact `name` (track.artifacts) of a finished run; returns when the upload is complete.

        `files`: path in the artifact -> file. A tracker without files does nothing.
        """


def numbers_of(row: Row) -> dict[str, float]:
    """Return the numbers of a step's row by key, without missing ones.

    "policy_version" is last: it marks a complete row in trackers that store one number after the other.
    """
    found = {named(key): value for key, value in row.items() if value is not None and key != "step"}
    return _last(found, "policy_version")


def numbers_of_eval(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation: eval/mean, eval/ci/0, eval/sources/NAME/mean, ..., eval/policy_version
    last."""
    numbers = {key: value for key, value in flatten(row).items() if isinstance(value, int | float)}
    found = {f"eval/{named(key)}": value for key, value in numbers.items()}  # names of sources are arbitrary
    return _last(found, "eval/policy_version")


def _last(numbers: Mapping[str, float], key: str) -> dict[str, float]:
    others = {name: value for name, value in numbers.items() if name != key}
    return others | ({key: numbers[key]} if key in numbers else {})


def flatten(values: Mapping[str, Any] | Sequence[Any], under: str = "") -> dict[str, Any]:
    """Return the leaves of nested tables and lists by their paths, joined by slashes."""
    found: dict[str, Any] = {}
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
    for key, value in pairs:
        if isinstance(value, Mapping | list | tuple):
            found |= flatten(value, f"{under}{key}/")
        elif value is not None:
            found[f"{under}{key}"] = value
    return found


def as_paths(values: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Rename the keys so that they are valid file paths of at most `most` characters.

    Other characters and parts such as .. become _; a name that is also the folder of another gets a trailing _.
    """
    names = {key: _NOT_IN_PATHS.sub("_", key) for key in values}
    names = {key: of if len(of) <= most else f"{of[:100]}...{of[103 - most :]}" for key, of in names.items()}
    parts = [name.split("/") for name in names.values()]
    folders = {"/".join(of[:n]) for of in parts for n in range(1, len(of))}
    return {f"{name}_" if name in folders else name: values[key] for key, name in names.items()}


def redacted(text: str) -> str:
    """Mask the values of environment variables that are named like secrets, and credentials in addresses."""
    for form in sorted({form for value in secrets() for form in _forms(value)}, key=len, reverse=True):
        text = text.replace(form, "***")
    return _IN_ADDRESS.sub("***", text)


def _forms(value: str) -> set[str]:
    """Return the forms of a secret in messages: plain, in an address, in JSON, as Python repr, on one line."""
    return {
        value,
        quote(value, safe=""),
        quote_plus(value),
        json.dumps(value)[1:-1],
        repr(value)[1:-1],
        " ".join(value.split()),
    }


def secrets() -> list[str]:
    """Return the values of environment variables that are named like secrets."""
    return [value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= _LEAST_SECRET]


def without_secrets(value: Any) -> Any:
    """Redact each string of a JSON value."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: without_secrets(item) for key, item in value.items()}
    return [without_secrets(item) for item in value] if isinstance(value, list | tuple) else value
