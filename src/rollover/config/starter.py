"""Writes a recipe as a file of the user's own, with every key of the configuration explained.

What the recipe sets is set, with the recipe's own comment behind it; every other key is there as a comment, `#key =
value`, with the value that it has under this recipe. The file loads to the configuration of the recipe.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import rollover
from rollover.config import describe
from rollover.config.load import load_config
from rollover.config.recipes import recipe
from rollover.files import check_output_file


def write_starter(name: str, target: Path) -> None:
    """Write the recipe `name` to `target`. ValueError if there is no such recipe, or `target` is there already."""
    text = starter(name)
    check_output_file(target, "rollover init:")
    if target.exists():
        raise ValueError(f"rollover init: {target} is there already: give the name of another file, or remove it")
    target.write_text(text, encoding="utf-8")


def starter(name: str) -> str:
    """Return the text of that file."""
    path = recipe(name)
    resolved = load_config([path])
    source = path.read_text(encoding="utf-8")
    head = re.match(r"(?:#.*\n)*", source)
    notes = _notes(source)

    def line(key: str, name: str, value: Any) -> str:
        origin = resolved.origin.get(key, "")
        if origin == str(path):
            note = notes.get(key)
            return f"{name} = {describe.toml_value(value)}" + (f"  # {note}" if note else "")
        if re.search(r"\.[1-9]\d*\.", key):  # explained above, in the first row
            return ""
        return f"#{name} = {describe.toml_value(value)}" + (f"  # {origin}" if origin else "")

    lines = [
        f"# The recipe {name} of Rollover {rollover.__version__}, as `rollover init {name}` writes it. A line like",
        "# `#key = value` shows the value that the key has: remove its # and change it. What is changed on the command",
        "# line (--table.key VALUE) is above what is written here.",
        "#",
        (head[0] if head else "").rstrip(),
        *describe.lines_of(resolved.config, line),
    ]
    return "\n".join(lines) + "\n"


def _notes(text: str) -> dict[str, str]:
    """Dotted key -> the comment behind its value, of a file that has each value on one line."""
    table, found, rows = "", {}, {}
    for line in text.splitlines():
        if header := re.match(r"(\[+)([\w.]+)\]", line):
            table = header[2]
            if len(header[1]) == 2:
                rows[table] = rows.get(table, -1) + 1
                table = f"{table}.{rows[table]}"
        elif match := re.match(r"(\w+) *= *[^#]*#(.*)$", line):
            found[f"{table}.{match[1]}"] = match[2].strip()
    return found
