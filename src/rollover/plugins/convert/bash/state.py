"""The shell state of a script at one line: values of names, and their merge after a condition."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollover.plugins.convert.bash.text import MOST_CHARS, Text, plain, unknown

BLANKS = " \t\n"  # $IFS, if the script does not set it
_COUNTED = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
_KEPT = ("PWD", "HOME", "IFS")  # no settings file changes them
Value = Text | list[Text]


def unset_name(name: str) -> Text:
    """Return the value of an unset name: unknown, with the fix."""
    if name.isdigit():
        return unknown(f"${name}", f"${name} is an argument of the script: write its value in its place")
    settle = f": set it in the environment, `{name}=... rollover convert FILE`" if name.isidentifier() else ""
    return unknown(f"${name}", f"${name} has no value{settle}")


def not_evaluated(source: str) -> Text:
    """Return an unknown value for an expression that this package does not evaluate."""
    return unknown(source, f"{source} is not evaluated: write the value in its place")


@dataclass
class State:
    """The state of one shell.

    names: texts and arrays by name. functions: name -> (text, line). exported: names that a child process sees.
    arguments: `$1`, `$2`...; None if unknown. exports_all: whether assignments export (`set -a`). ended: `exit` or
    `return` after such a command. returned: the merged state of earlier possible returns. local: outer values of the
    function's local names. unset_doubt: why an unset name may have a value; empty if it has none.
    """

    environment: Mapping[str, str]
    names: dict[str, Value] = field(default_factory=dict)
    functions: dict[str, tuple[str, int]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    arguments: list[Text] | None = field(default_factory=list)
    exports_all: bool = False
    ended: str = ""
    returned: State | None = None
    local: dict[str, tuple[Value | None, bool]] = field(default_factory=dict)
    unset_doubt: str = ""

    def copy(self) -> State:
        """Return an independent copy."""
        copied = {name: getattr(self, name).copy() for name in ("names", "functions", "exported", "local")}
        return replace(self, **copied)

    def child_state(self) -> State:
        """Return the state of a child process: exported names, without arrays and functions."""
        names: dict[str, Value] = {
            n: value for n, value in self.names.items() if n in self.exported and isinstance(value, Text)
        }
        return State(self.environment, names, exported=set(self.exported), unset_doubt=self.unset_doubt)

    # Values

    def text(self, name: str, default: str = "") -> str:
        """Return the text of a name."""
        value = self.names.get(name, default)
        return value.text if isinstance(value, Text) else default

    def named(self, name: str, script: str) -> Text | None:
        """Return the value of a name, argument or array item; None if unset. script: the path of `$0`."""
        if name in ("BASH_SOURCE", "BASH_SOURCE[0]", "0"):
            source = None if name == "0" else self.names.get("BASH_SOURCE")  # of a file that is sourced
            return source if isinstance(source, Text) else plain(script) if script else None
        if name == "#":
            return not_evaluated("$#") if self.arguments is None else plain(str(len(self.arguments)))
        if name.isdigit():
            if self.arguments is None:
                return unknown(f"${name}", "arguments that are not known")
            return self.arguments[int(name) - 1] if len(name) < 4 and int(name) <= len(self.arguments) else None
        name, bracket, index = name.partition("[")
        value = self.names.get(name)
        if not bracket and (value is not None or re.fullmatch(r"\w+", name)):
            return value if not isinstance(value, list) else value[0] if value else None
        if not re.fullmatch(r"-?\d{1,4}\]", index):
            return not_evaluated(f"${{{name}{bracket}{index}}}")
        items, at = value if isinstance(value, list) else [], int(index[:-1])
        return items[at] if -len(items) <= at < len(items) else None

    def items_of(self, text: str) -> list[Text] | None:
        """Return the items of `@`, `*` or `NAME[@]`; None for anything else."""
        if text in ("@", "*"):
            return [unknown(f"${text}", "arguments that are not known")] if self.arguments is None else self.arguments
        if match := re.fullmatch(r"(\w+)\[[@*]\]", text):
            value = self.names.get(match[1]) or unset_name(match[1])
            return [value] if isinstance(value, Text) and match[1] not in self.names else self.array(match[1])
        return None

    def array(self, name: str) -> list[Text]:
        """Return the items of a name; its value if it is no array."""
        value = self.names.get(name, [])
        return value if isinstance(value, list) else [value]

    # Changes

    def assign(self, name: str, value: Value) -> None:
        """Set a name. If the value is unknown, that of the environment applies."""
        if isinstance(value, Text):
            if not value.known and name in self.environment:
                value = plain(self.environment[name])
            if len(value.text) > MOST_CHARS:
                value = unknown(f"${name}", f"${name} has more than {MOST_CHARS:,} characters")
            if self.exports_all:
                self.exported.add(name)
        self.names[name] = value

    def set_unknown(self, name: str, why: str) -> None:
        """Set a name to an unknown value; if it is no valid name, put all names in doubt."""
        if name.isidentifier():
            self.assign(name, unknown(f"${name}", why))
        else:
            self.doubt(f"{name[:60]}: {why}")

    def set_counted_unknown(self, text: str) -> None:
        """Set the names that an arithmetic expression assigns to unknown values."""
        for match in _COUNTED.finditer(text):
            name = match[1] or match[2]
            self.set_unknown(name, f"${name} is counted in `{' '.join(text.split())[:60]}`")

    def doubt(self, why: str) -> None:
        """Put all names in doubt, unset ones too, except those that the environment sets."""
        why = f"in doubt: {why}"
        for name, value in self.names.items():
            if isinstance(value, list):
                self.names[name] = [item.doubted(why) for item in value] or [unknown(f"${name}", why)]
            elif name not in _KEPT:
                settled = name in self.environment
                self.names[name] = plain(self.environment[name]) if settled else value.doubted(why)
        self.unset_doubt = why

    def make_local(self, name: str) -> None:
        """Save the outer value of a name until the function returns."""
        self.local.setdefault(name, (self.names.get(name), name in self.exported))

    def leave(self, line: int, outer: dict[str, tuple[Value | None, bool]] | None = None) -> None:
        """End a function or a sourced file, and merge earlier returns. outer: the caller's local names."""
        if self.ended == "return":
            self.ended = ""
        if (before := self.returned) is not None and not self.ended:
            self.returned = None
            self.merge([before, self.copy()], line)
        if outer is None:
            return
        for name, (value, is_exported) in self.local.items():
            self.names.pop(name, None)
            self.exported = self.exported - {name} | ({name} if is_exported else set())
            self.names |= {name: value} if value is not None else {}
        self.local = outer

    def merge(self, states: Sequence[State], line: int) -> None:
        """Take the values that all states share; put others in doubt, except those that the environment sets."""
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
            self.returned.merge([replace(state, ended="", returned=None) for state in returned], line)
        if not left:
            return
        where = f"under a condition of the script (line {line})"
        names = dict.fromkeys(name for state in left for name in state.names)
        self.names = {name: self._common(name, left, where) for name in names}
        self.functions = {name: body for state in left for name, body in state.functions.items()}
        self.exported = set().union(*(state.exported for state in left))
        self.exports_all = any(state.exports_all for state in left)
        self.local = {name: before for state in left for name, before in state.local.items()}
        self.unset_doubt = next((state.unset_doubt for state in left if state.unset_doubt), "")
        same = all(state.arguments == left[0].arguments for state in left)
        self.arguments = left[0].arguments if same else None

    def _common(self, name: str, states: Sequence[State], where: str) -> Value:
        values = [state.names.get(name) for state in states]
        if all(value == values[0] for value in values) and values[0] is not None:
            return values[0]
        texts = [value for value in values if isinstance(value, Text)]
        if texts and len(texts) == sum(value is not None for value in values):
            if name in self.environment:
                return plain(self.environment[name])
            # A value assigned in a branch is a better guess than the earlier one.
            return texts[-1].doubted(f"{where}: settle it in the environment, `{name}=... rollover convert FILE`")
        found = [state.array(name) for state in states]  # shared items at the front, then all others
        num = next((i for i, items in enumerate(zip(*found, strict=False)) if any(item != items[0] for item in items)),
                   min(map(len, found)))  # fmt: skip
        others = dict.fromkeys(item for items in found for item in items[num:])
        return [*found[0][:num], *(item.doubted(where) for item in others)]
