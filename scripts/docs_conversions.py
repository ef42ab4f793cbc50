"""The tables of docs/coming-from.md, from the mappings and docs/differences.toml.

`python scripts/docs_conversions.py docs/coming-from.md` writes them.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from rollover.files import atomic_write_text
from rollover.plugins.convert.conversion import SYSTEMS
from rollover.plugins.convert.mapping import Row, System


def as_markdown(system: System) -> str:
    """The rows of a system as a table: its options, ours, and what is different or why there is none."""
    with_ours = [row for row in system.rows if row.keys]
    without = _by_reason([row for row in system.rows if not row.keys])
    lines = [f"| {system.name} | here | |", "|---|---|---|"]
    lines += [f"| {_names((row.option, *row.also))} | {_names(row.keys)} | {row.note} |" for row in with_ours]
    if not without:
        return "\n".join(lines) + "\n"
    lines += ["", f"Of {system.name}, without a counterpart:", "", f"| {system.name} | why |", "|---|---|"]
    lines += [f"| {_names(tuple(options))} | {_reason(reason, asks)} |" for (reason, asks), options in without.items()]
    return "\n".join(lines) + "\n"


def differences_as_markdown(path: Path) -> str:
    """Return the table of features that differ, from a TOML file with one array of tables per system."""
    lines = ["| system | there | here |", "|---|---|---|"]
    for system, rows in tomllib.loads(path.read_text(encoding="utf-8")).items():
        lines += [f"| {system} | {row['there']} | {row['here']} |" for row in rows]
    return "\n".join(lines) + "\n"


def in_document(path: Path) -> str:
    """Return the document with current tables between its markers `<!-- table: NAME -->` and `<!-- end -->`."""

    def table(match: re.Match[str]) -> str:
        of = match[2]
        rows = (
            differences_as_markdown(path.with_name("differences.toml"))
            if of == "differences"
            else as_markdown(SYSTEMS[of])
        )
        return f"{match[1]}\n{rows}{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?(<!-- end -->)", table, path.read_text(encoding="utf-8"), flags=re.S)


def _by_reason(rows: list[Row]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        asks = "" if row.neutral is None else ", ".join(f"`{value}`" for value in row.neutral)
        key = (row.note, "any" if row.neutral == () else asks)
        found.setdefault(key, []).extend((row.option, *row.also))
    return found


def _reason(reason: str, asks: str) -> str:
    if not asks:
        return reason
    return f"{reason}. Asked about{'' if asks == 'any' else f', unless it is {asks}'}"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    document = Path(sys.argv[1])
    atomic_write_text(document, in_document(document))
