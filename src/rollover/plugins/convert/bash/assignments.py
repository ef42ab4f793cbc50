"""Assignments of a script: names, arrays, declarations and counters."""

from __future__ import annotations

import re
from typing import Any

from rollover.plugins.convert.bash.builtins import declare_assigned, declare_name, declare_words, unset
from rollover.plugins.convert.bash.text import Text, plain, unknown
from rollover.plugins.convert.bash.words import Words


def assign(words: Words, node: Any) -> None:
    """Evaluate `NAME=VALUE`, `NAME+=VALUE` and arrays."""
    target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
    name = words.source(target)
    adds = any(child.type == "+=" for child in node.children)
    if target.type == "subscript":
        array = name.partition("[")[0]
        words.state.assign_items(array, [unknown(f"${array}", f"an item of {array} is set by its index")])
    elif value is not None and value.type == "array":
        items = [item for c in value.named_children if c.type != "comment" for item in words.fields(c)]
        before = words.state.arrays.get(name, []) if adds else []
        if adds and not before and name in words.state.names:
            before = [words.state.names[name]]
        words.budget.spend(steps=(len(before) + len(items)) // 20)
        words.state.assign_items(name, [*before, *items])
    else:
        text = words.value(value) if value is not None else Text()
        if adds and name in words.state.arrays:
            items = words.state.arrays[name]
            words.state.assign_items(name, [(items[0] if items else Text()) + text, *items[1:]])
        else:
            words.state.assign(name, words.state.names.get(name, Text()) + text if adds else text)


def declare(words: Words, node: Any, line: int) -> None:
    """Evaluate `export NAME=VALUE` and its siblings."""
    program = node.children[0].type
    options = [source for child in node.children if (source := words.source(child))[:1] in ("-", "+")]
    others: list[Text] = []
    for child in node.named_children:
        if child.type == "variable_assignment":
            name = words.source(child.child_by_field_name("name")).partition("[")[0]
            declare_name(words.state, program, name, options)
            assign(words, child)
            declare_assigned(words.state, program, name, options, line)
        elif child.type != "comment":
            others += words.fields(child)
    declare_words(words.state, program, others, line)


def remove(words: Words, node: Any, line: int) -> None:
    """Evaluate `unset`."""
    removed: list[Text] = []
    for child in node.named_children:
        removed += [plain(words.source(child))] if child.type == "variable_name" else words.fields(child)
    unset(words.state, removed, line)


def loop_items(words: Words, node: Any) -> list[Text] | None:
    """Return the values of a loop's name; None if one is unknown."""
    if "in" not in [child.type for child in node.children]:
        return None if words.state.arguments is None else list(words.state.arguments)
    items: list[Text] = []
    for child in node.children_by_field_name("value"):
        if found := re.fullmatch(r"\{(\d{1,4})\.\.(\d{1,4})\}", words.source(child)):
            items += [plain(str(i)) for i in range(int(found[1]), int(found[2]) + 1)]
        else:
            items += words.fields(child)
    return items if all(item.known or item.in_doubt for item in items) else None
