"""What the names of a script stand for at one place, and what is left of it after a condition."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollover.plugins.convert.bash.text import MOST_CHARS, Text, plain, unknown

_COUNTED = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
_KEPT = ("PWD", "HOME", "IFS")  # which no file of settings changes


@dataclass
class State:
    """names, arrays: values by name. functions: bodies by name. exported: names that a child process sees. arguments:
    `$1`, `$2`...; None if they are unknown. exports_all: whether each name that is assigned is exported. pushed: the
    directories of `pushd`. ended: `exit` or `return` if that came. returned: the state where a
    function may have returned before. local: what local names of the function stand for outside of it. unseen: why a
    name that is not set may have a value; empty if it has none."""

    environment: Mapping[str, str]
    names: dict[str, Text] = field(default_factory=dict)
    arrays: dict[str, list[Text]] = field(default_factory=dict)
    functions: dict[str, Any] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    arguments: list[Text] | None = field(default_factory=list)
    exports_all: bool = False
    pushed: tuple[Text, ...] = ()
    ended: str = ""
    returned: State | None = None
    local: dict[str, State] = field(default_factory=dict)
    unseen: str = ""

    def copy(self) -> State:
        """The same values, to be changed apart."""
        arrays = {name: list(items) for name, items in self.arrays.items()}
        arguments = None if self.arguments is None else list(self.arguments)
        return replace(
            self,
            names=dict(self.names),
            arrays=arrays,
            functions=dict(self.functions),
            exported=set(self.exported),
            arguments=arguments,
            local=dict(self.local),
        )

    def of_child(self) -> State:
        """What a child process sees: exported names, without arrays and functions."""
        names = {name: value for name, value in self.names.items() if name in self.exported}
        return State(self.environment, names, exported=set(self.exported), unseen=self.unseen)

    def assign(self, name: str, value: Text) -> None:
        """Set a name; one whose value is unknown keeps that of the environment, which settles it."""
        if not value.known and name in self.environment:
            value = plain(self.environment[name])
        if len(value.text) > MOST_CHARS:
            value = unknown(f"${name}", f"${name} has more than {MOST_CHARS:,} characters")
        self.arrays.pop(name, None)
        self.names[name] = value
        if self.exports_all:
            self.exported.add(name)

    def assign_items(self, name: str, items: list[Text]) -> None:
        """Set an array."""
        self.names.pop(name, None)
        self.arrays[name] = items

    def forget(self, name: str, why: str) -> None:
        """Set a name to an unknown value."""
        self.assign(name, unknown(f"${name}", why))

    def count(self, text: str) -> None:
        """Forget names that an arithmetic expression assigns."""
        for match in _COUNTED.finditer(text):
            name = match[1] or match[2]
            self.forget(name, f"${name} is counted in `{' '.join(text.split())[:60]}`")

    def doubt(self, why: str) -> None:
        """Put every name in doubt, also those that are not set; the environment settles them."""
        why = f"in doubt: {why}"
        for name, value in self.names.items():
            if name not in _KEPT:
                settled = name in self.environment
                self.names[name] = plain(self.environment[name]) if settled else value.doubted(why)
        for name, items in self.arrays.items():
            self.arrays[name] = [item.doubted(why) for item in items] or [unknown(f"${name}", why)]
        self.unseen = why

    def unset(self, name: str) -> None:
        """Remove a name."""
        self.names.pop(name, None)
        self.arrays.pop(name, None)

    def make_local(self, name: str) -> None:
        """Note what a name stands for until the function returns."""
        outside = State({}, self._part(self.names, name), self._part(self.arrays, name))
        outside.exported = self.exported & {name}
        self.local.setdefault(name, outside)

    def leave(self, line: int) -> None:
        """End a function or a sourced file: it may have returned before."""
        if self.ended == "return":
            self.ended = ""
        if (before := self.returned) is not None and not self.ended:
            self.returned = None
            self.one_of([before, self.copy()], line)

    def forget_local(self, outer: dict[str, State]) -> None:
        """Give local names the values that they have outside of the function. outer: the names local there."""
        for name, before in self.local.items():
            self.unset(name)
            self.exported = (self.exported - {name}) | before.exported
            self.names |= before.names
            self.arrays |= before.arrays
        self.local = outer

    @staticmethod
    def _part(table: dict[str, Any], name: str) -> dict[str, Any]:
        return {name: table[name]} if name in table else {}

    def one_of(self, states: Sequence[State], line: int) -> None:
        """Take over what these states have in common; all else is in doubt, unless the environment settles it."""
        left = [state for state in states if state.ended != "exit"]
        returned = [state.returned for state in states if state.returned is not None]
        if any(not state.ended for state in left):
            returned += [state for state in left if state.ended]
            left = [state for state in left if not state.ended]
        else:
            self.ended = states[-1].ended if not left else "return"
        if returned:
            self.returned = returned[0].copy()
            self.returned.ended, self.returned.returned = "", None
            self.returned.one_of([replace(state, ended="", returned=None) for state in returned], line)
        if not left:
            return
        where = f"under a condition of the script (line {line})"
        self.names = {name: self._name(name, left, where) for name in _keys([state.names for state in left])}
        self.arrays = {name: _items(name, left, where) for name in _keys([state.arrays for state in left])}
        self.functions = {name: body for state in left for name, body in state.functions.items()}
        self.exported = set().union(*(state.exported for state in left))
        self.exports_all = any(state.exports_all for state in left)
        self.local = {name: before for state in left for name, before in state.local.items()}
        self.unseen = next((state.unseen for state in left if state.unseen), "")
        same = all(state.arguments == left[0].arguments for state in left)
        self.arguments = left[0].arguments if same else None

    def _name(self, name: str, states: Sequence[State], where: str) -> Text:
        values = [state.names.get(name) for state in states]
        if all(value == values[0] for value in values) and values[0] is not None:
            return values[0]
        if name in self.environment:
            return plain(self.environment[name])
        settle = f"{where}: settle it in the environment, `{name}=... rollover convert FILE`"
        # An alternative that is assigned in a branch tells more than what was there before.
        return [value for value in values if value is not None][-1].doubted(settle)


def _keys(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _items(name: str, states: Sequence[State], where: str) -> list[Text]:
    """The items that all have in front, and every other one in doubt."""
    found = [state.arrays.get(name, []) for state in states]
    num = 0
    while all(len(items) > num and items[num] == found[0][num] for items in found):
        num += 1
    if all(len(items) == num for items in found):
        return found[0]
    others = dict.fromkeys(item for items in found for item in items[num:])
    return [*found[0][:num], *(item.doubted(where) for item in others)]
