"""Rows that map options of another system to our keys, and the conversion by them.

Reads no files: the modules of the systems do. Does not load or check our configuration: conversion.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from rollover.config.run import TOOLS

# Notes of options without a counterpart that change no result.
COMPUTE = "where and in what portions it computes: `[engine]`, `[backend]`, `[cluster]` and `train.micro_batch_tokens`"
SETS_NOTHING = "sets nothing, given the other options"
_SOURCES = "tasks.sources"
TRACKING = "what is shown and stored of a run, and where: `[track]`; W&B and others: docs/trackers.md"


class Unanswered(ValueError):
    """An option whose conversion needs the user's answer. values: of our keys, valid whatever the answer is."""

    def __init__(self, question: str, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(question)
        self.values = values or {}


@dataclass(frozen=True)
class Unknown:
    """An option whose value could not be read. reason: why."""

    reason: str


@dataclass(frozen=True)
class LeftOut:
    """Part of a file that is no option. reason: why it can be left out."""

    reason: str


class Options:
    """A system's options by name: given values, else the rows' defaults.

    unknown: options whose value could not be read; `guessed` collects those whose default was used.
    """

    def __init__(self, given: Mapping[str, Any], rows: Sequence[Row], unknown: Collection[str] = ()) -> None:
        self.given, self.rows = given, rows
        self._defaults = {row.option: row.default for row in rows}
        self._unknown, self.guessed = unknown, dict[str, None]()

    def __call__(self, option: str) -> Any:
        if option in self._unknown:
            self.guessed[option] = None
        return self.given[option] if option in self.given else self._defaults.get(option)

    def with_example(self, option: str) -> Options:
        """Return the options with one set to its row's example."""
        example = next((row.example for row in self.rows if row.option == option), None)
        return Options({**self.given, option: example}, self.rows)


To = Callable[[Any, Options], Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One option of another system, or all options that match a pattern (`*`).

    keys: our keys; empty = no counterpart. to(value, options): values by our keys; default: `value` for the one key. It
    raises Unanswered for a value without a counterpart. default: the other system's, written to the TOML where a file
    does not set the option (None: nothing is written). example: a value that changes the resolved run (None: every
    value needs an answer, which the keys give). also: other names. note: differences, or why there is no counterpart.
    neutral: values that change no result; None in a row without keys: all values. secret: the value may be a credential
    and is not printed. when(options): whether the option has an effect; default: always.
    """

    option: str
    keys: tuple[str, ...] = ()
    to: To | None = None
    default: Any = None
    example: Any = None
    also: tuple[str, ...] = ()
    note: str = ""
    neutral: tuple[Any, ...] | None = None
    secret: bool = False
    when: Callable[[Options], Any] | None = None

    @property
    def is_tracking(self) -> bool:
        """Whether the keys are tracking only: values without a counterpart are left out instead of asked about."""
        return bool(self.keys) and all(key == "run.name" or key.startswith("track.") for key in self.keys)

    def matches(self, option: str) -> bool:
        """Return whether this row is that of `option`."""
        return any(fnmatchcase(option, name) for name in (self.option, *self.also))

    def values(self, value: Any, options: Options) -> Mapping[str, Any]:
        """Return values by our dotted keys."""
        if self.when is not None and not self.when(options):
            return {}
        return self.to(value, options) if self.to else {self.keys[0]: value}


def without(note: str, *options: str, neutral: tuple[Any, ...] | None = None) -> Iterator[Row]:
    """Return rows of options without a counterpart. note, neutral: as in `Row`."""
    return (Row(option, note=note, neutral=neutral) for option in options)


@dataclass(frozen=True)
class System:
    """A system and its rows. base: options of a minimal configuration. steps: the option of the number of steps."""

    name: str
    rows: tuple[Row, ...]
    base: Mapping[str, Any]
    steps: str


@dataclass
class Conversion:
    """The result of a conversion.

    values: our key -> (value, source option as text). left_out: option -> why it can be left out. questions: option ->
    question to the user, as leaving it out would change results. notes: option -> difference. ranks: our key -> how
    closely the source option matches the key.
    """

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    questions: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, tuple[bool, ...]] = field(default_factory=dict)


def convert(system: System, options: Mapping[str, Any]) -> Conversion:
    """Convert options of `system`, by their names there."""
    done = Conversion()
    done.left_out |= {name: value.reason for name, value in options.items() if isinstance(value, LeftOut)}
    options = {name: value for name, value in options.items() if not isinstance(value, LeftOut)}
    rows = {name: next((row for row in system.rows if row.matches(name)), None) for name in options}
    given: dict[str, Any] = {}
    unread: set[str] = set()
    for name, row in rows.items():
        of_row = row.option if row and "*" not in row.option else name
        older = of_row != name and options[name] is None and of_row in options  # an older name that is left empty
        if isinstance(options[name], Unknown):
            unread.add(of_row)
        elif not older:
            given[of_row] = options[name]
    for name, row in rows.items():
        _convert_unmapped(done, name, row, options[name])
    for row in system.rows:
        if row.keys and (row.option in given or row.default is not None):
            _convert_row(done, row, Options(given, system.rows, unread - given.keys()))
    return done


def _convert_unmapped(done: Conversion, name: str, row: Row | None, value: Any) -> None:
    """Convert an option that is not known, could not be read, or has no counterpart."""
    if row is None:
        done.questions[name] = value.reason if isinstance(value, Unknown) else "is not known here"
    elif isinstance(value, Unknown) and (row.keys or row.neutral is not None):
        asked = done.left_out if row.is_tracking else done.questions
        asked[row.option if "*" not in row.option else name] = value.reason + (
            "" if row.keys or not row.note else f"; {row.note}"
        )
    elif not row.keys:
        harmless = row.neutral is None or value in row.neutral
        unread = f"; {value.reason}" if isinstance(value, Unknown) else ""
        (done.left_out if harmless else done.questions)[name] = row.note + unread


def _values_with_example(row: Row, options: Options, name: str) -> Mapping[str, Any] | None:
    """Return the values of a row with the option `name` set to its example; None if the row cannot convert that."""
    try:
        return row.values(options(row.option), options.with_example(name))
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
        return None


def _convert_row(done: Conversion, row: Row, options: Options) -> None:
    value = "***" if row.secret else options(row.option)
    shown = f"{row.option} = {value}" + ("" if row.option in options.given else ", the default")
    asked = done.left_out if row.is_tracking else done.questions
    options.guessed.clear()
    try:
        values = row.values(options(row.option), options)
    except Unanswered as error:
        asked[row.option] = str(error)
        values = error.values
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        # For example a text in place of a number, also in another option.
        asked[row.option] = f"{value!r} is not understood ({error})"
        values = {}
    for name in options.guessed:
        keys = next((other.keys for other in options.rows if other.option == name), ())
        # The other option's question covers it: a source is one answer, and so is a default with the same keys.
        answered = set(row.keys) <= set(keys) and (row.option not in options.given or row.keys == (_SOURCES,))
        if name == row.option or row.option in asked or answered:
            continue
        if values != _values_with_example(row, options, name):
            asked[row.option] = f"{value!r} goes with {name}, which is not read"
            values = {}
    if not values and row.option not in asked and options.given.get(row.option) and not row.is_tracking:
        done.left_out[row.option] = SETS_NOTHING
    if values and row.note and row.option in options.given:
        done.notes[row.option] = row.note
    for key, value in values.items():
        is_given = row.option in options.given
        # Of options that set a key to the same value, name the closest one.
        rank = (is_given, key in row.keys, len(row.keys) == 1)
        old = done.values.get(key)
        if old is not None and old[0] == value and done.ranks[key] >= rank:
            continue
        if is_given or old is None:
            done.values[key], done.ranks[key] = (value, shown), rank


# Trackers

_EMPTY = (None, "", "null", "none")


def tracker_values(names: Sequence[str]) -> dict[str, Any]:
    """Return track.trackers for tracker names. Raises Unanswered for those that do not exist here."""
    found = [name for name in dict.fromkeys(names) if name in TOOLS]
    values = {"track.trackers": found} if found else {}
    if missing := [name for name in names if name not in TOOLS]:
        raise Unanswered(f"there is no {', '.join(missing)}: a run is shown in {', '.join(TOOLS)}", values)
    return values


def log_completions(tools: Callable[[Options], Sequence[str]]) -> Any:
    """Return the function of a row that enables logging of completions."""
    return lambda value, options: {} if value else for_trackers(tools, "track.tracker_rollouts")(0, options)


def for_trackers(tools: Callable[[Options], Sequence[str]], key: str, of: Sequence[str] = TOOLS) -> Any:
    """Return the function of a row that sets `key` if one of the trackers `of` is used."""

    def to(value: Any, options: Options) -> dict[str, Any]:
        return {key: value} if value not in _EMPTY and set(of) & set(tools(options)) else {}

    return to
