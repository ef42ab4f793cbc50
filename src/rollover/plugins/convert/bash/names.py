"""Looks up names, arguments and items of arrays; the reasons why one has no value."""

from __future__ import annotations

import re

from rollover.plugins.convert.bash.state import State
from rollover.plugins.convert.bash.text import Text, plain, unknown


def named(state: State, name: str, script: str) -> Text | None:
    """The value of a name, an argument or an item of an array; None if it has none. script: the path behind `$0`."""
    if re.fullmatch(r"BASH_SOURCE(\[0\])?", name) and "BASH_SOURCE" in state.names:
        return state.names["BASH_SOURCE"]  # of a file that is sourced
    if name == "0" or re.fullmatch(r"BASH_SOURCE(\[0\])?", name):
        return plain(script) if script else None
    if name == "#":
        return unread("$#") if state.arguments is None else plain(str(len(state.arguments)))
    if name.isdigit():
        if state.arguments is None:
            return unknown(f"${name}", "arguments that are not known")
        return state.arguments[int(name) - 1] if len(name) < 4 and int(name) <= len(state.arguments) else None
    if match := re.fullmatch(r"(\w+)\[(-?\d{1,4})\]", name):
        items = state.arrays.get(match[1], [])
        index = int(match[2])
        return items[index] if -len(items) <= index < len(items) else None
    if name in state.arrays:
        return state.arrays[name][0] if state.arrays[name] else None
    if name in state.names:
        return state.names[name]
    return None if re.fullmatch(r"\w+", name) else unread(f"${{{name}}}")


def items_of(state: State, text: str) -> list[Text] | None:
    """The items that `@`, `*` or `NAME[@]` stand for; None for anything else."""
    if text in ("@", "*"):
        return [unknown(f"${text}", "arguments that are not known")] if state.arguments is None else state.arguments
    if match := re.fullmatch(r"(\w+)\[[@*]\]", text):
        if match[1] in state.arrays:
            return state.arrays[match[1]]
        return [state.names.get(match[1]) or missing(match[1])]
    return None


def missing(name: str) -> Text:
    """The value of a name that has none."""
    if name.isdigit():
        return unknown(f"${name}", f"${name} is an argument of the script: write its value in its place")
    settle = f": set it in the environment, `{name}=... rollover convert FILE`" if name.isidentifier() else ""
    return unknown(f"${name}", f"${name} has no value{settle}")


def unread(source: str) -> Text:
    """The value of what is not evaluated."""
    return unknown(source, f"{source} is not evaluated: write the value in its place")
