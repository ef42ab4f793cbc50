"""What an option of another system is here: rows, and how a system's options become values of ours.

Owns the conversion of options that are read already; who reads files is a module of its system. Never loads our
configuration: who calls does, and finds out what does not go together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from rollover.config.run import TOOLS

# Why options of every system have no counterpart, and no result depends on them.
COMPUTE = "where and in what portions it computes: `[engine]`, `[backend]`, `[cluster]` and `train.micro_batch_tokens`"
SETS_NOTHING = "sets nothing, given the other options"
_SOURCES = "tasks.sources"
TRACKING = "what is shown and stored of a run, and where: `[track]`; W&B and others: docs/trackers.md"


class Unanswered(ValueError):
    """An option that cannot be converted without changing what is learned. values: of ours, which hold in any case."""

    def __init__(self, question: str, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(question)
        self.values = values or {}


@dataclass(frozen=True)
class Unknown:
    """The value of an option that its file does not say outright. reason: what is there instead, in words."""

    reason: str


@dataclass(frozen=True)
class LeftOut:
    """Part of a file that is no option and is left out. reason: why nothing is lost by it, or who gives it."""

    reason: str


class Options:
    """A system's options by name: those given, else the system's defaults (None where a row has none). unread: options
    whose value is not known; `guessed` collects those whose default was taken."""

    def __init__(self, given: Mapping[str, Any], rows: Sequence[Row], unread: Collection[str] = ()) -> None:
        self.given, self.rows = given, rows
        self._defaults = {row.option: row.default for row in rows}
        self._unread, self.guessed = unread, dict[str, None]()

    def __call__(self, option: str) -> Any:
        if option in self._unread:
            self.guessed[option] = None
        return self.given[option] if option in self.given else self._defaults.get(option)

    def with_example(self, option: str) -> Options:
        """The same with the example of one option's row."""
        example = next((row.example for row in self.rows if row.option == option), None)
        return Options({**self.given, option: example}, self.rows)


To = Callable[[Any, Options], Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One option of another system, or all whose name has a pattern (`*`).

    keys: ours; none = no counterpart. to(value, options): values of ours; without it the value is that of the one key.
    It raises Unanswered for a value that has no counterpart. default: the other system's, which is written out where a
    file says nothing (None: nothing is). example: a value that changes the resolved run, with other options where it
    needs them (None: any value is asked about, and the keys answer it).
    note: what is different, or why there is no counterpart. neutral: values without which as much is learned; None of
    a row without keys: all are (the option changes no result). secret: its value may be a credential, and is not shown.
    when(options): whether the option has an effect beside the others; without it, always.
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
        """Whether no result depends on its keys: what has no counterpart is left out, and nobody is asked."""
        return bool(self.keys) and all(key == "run.name" or key.startswith("track.") for key in self.keys)

    def matches(self, option: str) -> bool:
        """Whether `option` is this row's."""
        return any(fnmatchcase(option, name) for name in (self.option, *self.also))

    def values(self, value: Any, options: Options) -> Mapping[str, Any]:
        """Values of ours, by dotted key."""
        if self.when is not None and not self.when(options):
            return {}
        return self.to(value, options) if self.to else {self.keys[0]: value}


def without(note: str, *options: str, neutral: tuple[Any, ...] | None = None) -> Iterator[Row]:
    """Rows of options without a counterpart. note, neutral: as in `Row`."""
    return (Row(option, note=note, neutral=neutral) for option in options)


@dataclass(frozen=True)
class System:
    """A system: its name and release, and its rows. base: options that make a whole configuration of the least. steps:
    the option that says how many steps there are."""

    name: str
    rows: tuple[Row, ...]
    base: Mapping[str, Any]
    steps: str


@dataclass
class Conversion:
    """values: ours -> (value, the other's option as it was written). without: option -> why it has no counterpart, and
    nothing is lost. questions: option -> what would be lost, which is to be answered. notes: option -> what is
    different here. ranks: how well the option of a value names its key."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    questions: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, tuple[bool, ...]] = field(default_factory=dict)


def convert(system: System, options: Mapping[str, Any]) -> Conversion:
    """The conversion of options of `system`, by their names there."""
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
    """An option that is not known, not read, or has no counterpart."""
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


def _values_with_example(row: Row, of: Options, name: str) -> Mapping[str, Any] | None:
    """The values of a row if an option has the value of its own row's example; None if there are none."""
    try:
        return row.values(of(row.option), of.with_example(name))
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
        return None


def _convert_row(done: Conversion, row: Row, of: Options) -> None:
    value = "***" if row.secret else of(row.option)
    shown = f"{row.option} = {value}" + ("" if row.option in of.given else ", the default")
    asked = done.left_out if row.is_tracking else done.questions
    of.guessed.clear()
    try:
        values = row.values(of(row.option), of)
    except Unanswered as error:
        asked[row.option] = str(error)
        values = error.values
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        # A text where a number belongs, say, also as the value of another option.
        asked[row.option] = f"{value!r} is not understood ({error})"
        values = {}
    for name in of.guessed:
        keys = next((other.keys for other in of.rows if other.option == name), ())
        # A place of the data is answered as a whole; so is a default whose key the other option has, too.
        answered = set(row.keys) <= set(keys) and (row.option not in of.given or row.keys == (_SOURCES,))
        if name == row.option or row.option in asked or answered:
            continue
        if values != _values_with_example(row, of, name):
            asked[row.option] = f"{value!r} goes with {name}, which is not read"
            values = {}
    if not values and row.option not in asked and of.given.get(row.option) and not row.is_tracking:
        done.left_out[row.option] = SETS_NOTHING
    if values and row.note and row.option in of.given:
        done.notes[row.option] = row.note
    for key, value in values.items():
        is_given = row.option in of.given
        # Of options that give a key the same value, the one is named that is about this key most of all.
        rank = (is_given, key in row.keys, len(row.keys) == 1)
        old = done.values.get(key)
        if old is not None and old[0] == value and done.ranks[key] >= rank:
            continue
        if is_given or old is None:
            done.values[key], done.ranks[key] = (value, shown), rank


# Trackers

_EMPTY = (None, "", "null", "none")


def tracker_values(names: Sequence[str]) -> dict[str, Any]:
    """track.trackers of the tools `names`. Unanswered names those that there are none of."""
    found = [name for name in dict.fromkeys(names) if name in TOOLS]
    values = {"track.trackers": found} if found else {}
    if missing := [name for name in names if name not in TOOLS]:
        raise Unanswered(f"there is no {', '.join(missing)}: a run is shown in {', '.join(TOOLS)}", values)
    return values


def log_completions(tools: Callable[[Options], Sequence[str]]) -> Any:
    """The function of a row that switches texts on: they go to a tool where they went there before."""
    return lambda value, options: {} if value else for_trackers(tools, "track.tracker_rollouts")(0, options)


def for_trackers(tools: Callable[[Options], Sequence[str]], key: str, of: Sequence[str] = TOOLS) -> Any:
    """The function of a row: the option is `key` where one of the tools `of` is named, and has no effect elsewhere."""

    def to(value: Any, options: Options) -> dict[str, Any]:
        return {key: value} if value not in _EMPTY and set(of) & set(tools(options)) else {}

    return to
