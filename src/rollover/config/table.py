"""Base of every table of the configuration: the class, rules over options, and their application.

Owns no option and no rule: the tables stand in files of their own, each with its rules below it, and `schema` puts them
together. Rules are functions of the whole configuration, which is above this file: they take it as `Any`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from rollover import registry

# Validation context of values that are not settled yet: options that a later layer switches off may still be there, so
# nothing is refused. load_config refuses by itself, and tells which layer set what.
UNSETTLED = object()

OWN = "module:function"  # among the values of a condition: any custom function
Condition = tuple[Any, ...]
"""(key, value, ...): the option behind the key has one of these values. (key,) alone: it is set, which 0, "", "none"
and false are not."""
_GROUP = "rollover."


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names file, key and fix."""


class Layer(dict[str, Any]):
    """Values of a configuration, by dotted keys, and who sets them: `label`, in messages."""

    def __init__(self, label: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.label = label


class Table(BaseModel):
    """A table of options: unknown keys are errors, and values are not coerced from the wrong type.

    Checked where it is made, and frozen. pydantic's `model_copy(update=...)` and `model_construct` check nothing: make
    a new table of values that may be wrong.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=False,
        validate_default=False,
        frozen=True,
        allow_inf_nan=False,  # but for an `option(unlimited=True)`
        ser_json_inf_nan="constants",  # a run's config.resolved.json is read back
    )

    only_if: ClassVar[Condition] = ()
    """A condition of every option of this table, except for the option that the condition reads."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name, info in cls.model_fields.items() if cls.only_if else ():
            key, *values = cls.only_if
            if not key.endswith(f".{name}"):
                conditions: Any = info.json_schema_extra
                conditions["only_if"] = {key: values or "set", **conditions.get("only_if", {})}

    @field_validator("*", mode="after")
    @classmethod
    def _with_places(cls, value: Any, info: ValidationInfo) -> Any:
        """Put the module:attribute of an entry point in place of its name."""
        kind = entry_points_of(cls.model_fields[info.field_name or ""])
        return registry.resolved(kind, value) if kind else value

    def neutral(self, name: str) -> tuple[Any, ...]:
        """Values of an option that mean the same as leaving it out: setting one is never an option without effect."""
        return (type(self).model_fields[name].get_default(call_default_factory=True),)


def option(  # noqa: PLR0913 - pydantic's four bounds, and ours
    default: Any,
    doc: str,
    *,
    only_if: Condition | list[Condition] = (),
    unless: Condition | list[Condition] = (),
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    unlimited: bool = False,
    entry_points: str = "",
) -> Any:
    """Make a field of a table.

    `only_if`, `unless`: setting the option is an error where these do not hold; `rollover config` and the JSON schema
    show them. `unlimited`: a limit that may be inf; every other number must be finite. `entry_points`: the kind of
    registry.KINDS whose registered names the option accepts. gt, ge, lt and le: pydantic's bounds.
    """
    said = {"only_if": _listed(only_if), "unless": _listed(unless)}
    conditions: Any = {
        word: {key: list(values) or "set" for key, *values in each} for word, each in said.items() if each
    }
    if entry_points:
        conditions["entry_points"] = f"{_GROUP}{entry_points}"
    bounds: Any = {"gt": gt, "ge": ge, "lt": lt, "le": le} | ({"allow_inf_nan": True} if unlimited else {})
    return Field(default=default, description=doc, json_schema_extra=conditions, **bounds)


def _listed(conditions: Condition | list[Condition]) -> list[Condition]:
    return conditions if isinstance(conditions, list) else [conditions] if conditions else []


def is_own(name: str) -> bool:
    """Whether a value names a function of the user's own (module:function or path.py:function)."""
    return ":" in name


# Rules


@dataclass(frozen=True)
class Inert:
    """`options` have no effect when `when(config)` holds; `because` names the settings that switch them off."""

    options: tuple[str, ...]
    because: tuple[str, ...]
    when: Callable[[Any], bool]
    why: str | Callable[[Any], str]
    """Completes "<option> has no effect ..."."""
    fix: str = ""
    """How to give the option an effect."""
    neutral: tuple[Any, ...] = ()
    """Values that the options may have all the same; one of an earlier layer is reset to the first. Empty: the
    default."""

    def reason(self, config: Any) -> str:
        return self.why if isinstance(self.why, str) else self.why(config)

    def message(self, key: str, config: Any) -> str:
        advice = f"{self.fix}, or remove {key}" if self.fix else f"Remove {key}"
        return f"{key} has no effect {self.reason(config)}. {advice}"

    def without_effect(self, config: Any, keys: Collection[str]) -> list[str]:
        """Return the options of this rule, of those among `keys`, that are set and have no effect in `config`."""
        of_these = [key for key in self.options if key in keys]
        if not of_these or not self.when(config):
            return []
        return [key for key in of_these if value_of(config, key) not in (self.neutral or neutral_values(config, key))]


@dataclass(frozen=True)
class Refused:
    """A combination of `keys` that is an error when `when(config)` holds. `message` says why, and what to change."""

    keys: tuple[str, ...]
    when: Callable[[Any], bool]
    message: str | Callable[[Any], str]

    def problem(self, config: Any) -> str:
        """Return the message; "" where `config` has no such combination."""
        if not self.when(config):
            return ""
        return self.message if isinstance(self.message, str) else self.message(config)


def wrong(keys: tuple[str, ...], why: Callable[[Any], str]) -> Refused:
    """Return the rule that refuses `keys` where `why(config)` gives a message, and not ""."""
    return Refused(keys, lambda c: bool(why(c)), why)


Rule = Inert | Refused


@dataclass(frozen=True)
class Needs:
    """One condition of an option; see `option`."""

    key: str
    values: tuple[Any, ...]
    unless: bool

    def holds(self, config: Any) -> bool:
        value = value_of(config, self.key)
        if self.values:
            met = value in self.values or (OWN in self.values and is_own(value))
        else:
            met = bool(value) and value != "none"
        return met != self.unless

    def __str__(self) -> str:
        """`only if algorithm.advantage = "gae"`, as it stands in the doc of an option."""
        if self.unless:
            return f"not with {self._said}"
        return f"only if {self._said}" if self.values else f"only if {self.key} is set"

    @property
    def _said(self) -> str:
        if not self.values:
            return self.key
        words = [_function_or(value) for value in self.values]
        return f"{self.key} = {' or '.join(words)}" if len(words) < 4 else f"{self.key} is one of {', '.join(words)}"

    def rule(self, option: str) -> Inert:
        """Return the rule that `option` has no effect where this condition does not hold."""

        def why(config: Any) -> str:
            now = json.dumps(value_of(config, self.key), ensure_ascii=False)
            if self.unless or not self.values:
                return f"with {self.key} = {now}"
            return f"unless {self._said} (it is {now})"

        change = (
            f"Set {self._said}" if len(self.values) == 1 else f"Change {self.key}" if self.values else f"Set {self.key}"
        )
        return Inert((option,), (self.key,), lambda c: not self.holds(c), why, "" if self.unless else change)


def _function_or(value: Any) -> str:
    return "a custom function" if value == OWN else json.dumps(value)


def needs_of(info: FieldInfo) -> list[Needs]:
    """Return the conditions of an option."""
    said = info.json_schema_extra
    if not isinstance(said, dict):
        return []
    found: list[Needs] = []
    for word in ("only_if", "unless"):
        conditions: Any = said.get(word, {})
        found += [Needs(key, () if v == "set" else tuple(v), word == "unless") for key, v in conditions.items()]
    return found


def entry_points_of(info: FieldInfo) -> str:
    """Return the kind of registry.KINDS whose names an option takes; "" if it takes none."""
    said = info.json_schema_extra
    return str(said.get("entry_points", "")).removeprefix(_GROUP) if isinstance(said, dict) else ""


def on_fields(table: type[Table], prefix: str) -> list[Rule]:
    """Return the rules that follow from how a table's options are declared: by conditions and by kinds of names."""
    rules: list[Rule] = []
    for name, info in table.model_fields.items():
        rules += [needs.rule(f"{prefix}.{name}") for needs in needs_of(info)]
        kind = entry_points_of(info)
        if kind and kind != "rewards":  # whose names have parameters: rewards/routing.py
            rules.append(_known(f"{prefix}.{name}", kind, info.get_default(call_default_factory=True)))
    return rules


def _known(key: str, kind: str, default: Any) -> Refused:
    """Return the rule that every name in an option is one of this kind, or the default."""

    def problems(config: Any) -> str:
        value = value_of(config, key)
        names = [name for name in ([value] if isinstance(value, str) else value) if name != default]
        lines = [(json.dumps(name), registry.why_unknown(kind, name)) for name in names]
        return "\n".join(f"{key} = {name} {why}" for name, why in lines if why)

    return wrong((key,), problems)


def refuse(config: Any, rules: Iterable[Rule], keys: Collection[str]) -> None:
    """ValueError that names every combination in `config` that is refused, and every one of `keys` without effect."""
    inert: dict[str, str] = {}
    refused: list[str] = []
    for rule in rules:
        if isinstance(rule, Inert):
            for key in rule.without_effect(config, keys):
                inert.setdefault(key, rule.message(key, config))
        elif message := rule.problem(config):
            refused.append(message)
    if problems := [*inert.values(), *refused]:
        raise ValueError("\n".join(problems))


MOST_GB = 1e9  # its bytes are an integer of 64 bits


def memory_rules(key: str) -> tuple[Refused, Refused]:
    """Those about a limit of memory of a worker process, in GB."""
    return (
        Refused(
            (key,),
            lambda c: value_of(c, key) > 0 and sys.platform != "linux",
            lambda c: f"{key} = {value_of(c, key):g}: only Linux limits the memory of a process so. Set it to 0",
        ),
        Refused(
            (key,),
            lambda c: 0 < value_of(c, key) < 0.1,
            lambda c: (
                f"{key} = {value_of(c, key):g}: a worker needs some 0.03 of it for itself. Set it to 0.1 or more, or to"
                " 0 (no limit)"
            ),
        ),
    )


def alone(table: str, rules: Iterable[Rule]) -> list[Rule]:
    """Those rules that look at no other table."""

    def keys(rule: Rule) -> tuple[str, ...]:
        return rule.options + rule.because if isinstance(rule, Inert) else rule.keys

    return [rule for rule in rules if all(key.startswith(f"{table}.") for key in keys(rule))]


# Values by their dotted keys


def value_of(config: Any, key: str) -> Any:
    """Return the value of a dotted key (`tasks.sources.0.kind`) of a configuration, or of its `model_dump()`."""
    value: Any = config
    for part in key.split("."):
        if isinstance(value, list):
            value = value[int(part)]
        else:
            value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return value


def put(data: Any, key: str, value: Any) -> None:
    """Set the value behind a dotted key of nested dicts and lists; missing tables are made."""
    *path, name = key.split(".")
    for part in path:
        data = data[int(part)] if isinstance(data, list) else data.setdefault(part, {})
    data[name] = value


def neutral_values(config: Any, key: str) -> tuple[Any, ...]:
    """`Table.neutral` of a dotted key."""
    table, _, name = key.rpartition(".")
    return value_of(config, table).neutral(name)


def given(table: Table, prefix: str = "") -> Iterator[str]:
    """Dotted keys of the values that were set where `table` was made in Python; of a list of tables also those of its
    rows."""
    for name in table.model_fields_set:
        key, value = f"{prefix}{name}", getattr(table, name)
        if isinstance(value, Table):
            yield from given(value, f"{key}.")
            continue
        yield key
        for i, row in enumerate(value) if isinstance(value, list) else ():
            if isinstance(row, Table):
                yield from given(row, f"{key}.{i}.")


def table_of(annotation: Any) -> type[Table] | None:
    """Return the Table behind `annotation`, if it is one (not a list of them)."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Table) else None


def row_of(annotation: Any) -> type[Table] | None:
    """Return the Table of one element, if `annotation` is a list of tables ([[tasks.sources]])."""
    return table_of(get_args(annotation)[0]) if get_origin(annotation) is list else None
