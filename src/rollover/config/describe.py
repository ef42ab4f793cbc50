"""Prints a resolved configuration as TOML with the doc and origin of every value, as JSON, or the JSON schema.

Owns the text form of a configuration. Never loads or checks one. The TOML loads again to the same configuration.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from typing import Any

from rollover.config.load import Resolved
from rollover.config.schema import Config, expected
from rollover.config.table import Table, needs_of, row_of, table_of

_WIDTH = 100
Line = Callable[[str, str, Any], str]  # (dotted key, name, value) -> the line that sets it


def as_toml(resolved: Resolved) -> str:
    """Return the configuration as TOML: each key with its doc and accepted values above, and its layer behind."""

    def line(key: str, name: str, value: Any) -> str:
        return f"{name} = {toml_value(value)}  # {resolved.origin.get(key, 'default')}"

    lines = [f"# notice: {notice}" for notice in resolved.notices]
    lines += lines_of(resolved.config, line)
    return "\n".join(lines).strip() + "\n"


def settings_as_toml(config: Config) -> str:
    """Return the settings alone as TOML, for a process that loads a file."""
    return "\n".join(lines_of(config, lambda key, name, value: f"{name} = {toml_value(value)}")).strip() + "\n"


def as_json(resolved: Resolved) -> str:
    """Return the configuration as JSON: the content of a run's config.resolved.json."""
    return json.dumps(resolved.config.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def schema() -> str:
    """JSON schema (2020-12) of a configuration file."""
    return json.dumps(Config.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


def lines_of(table: Table, line: Line, key: str = "", *, header: str = "[{}]", path: str = "") -> list[str]:
    """Lines of TOML: headers, docs, and `line` for each value ("": none). Of a list of tables the first is explained.

    `key` is the name in the header, `path` the dotted name for `line` (with the index of an array's element).
    """
    path = path or key
    lines = []
    explained = not re.search(r"\.[1-9]\d*$", path)
    if key:
        doc = (type(table).__doc__ or "").strip().splitlines() if explained else ()
        lines += ["", *(f"# {text}" for text in doc), header.format(key)]
    inner_lines = []
    for name, info in type(table).model_fields.items():
        value, full = getattr(table, name), f"{path}.{name}" if path else name
        if table_of(info.annotation):
            inner_lines += lines_of(value, line, full)
        elif row_of(info.annotation) and value:
            for i, row in enumerate(value):
                inner_lines += lines_of(row, line, full, header="[[{}]]", path=f"{full}.{i}")
        else:
            takes = "; ".join([expected(info), *map(str, needs_of(info))])
            doc = f"{info.description or ''} ({takes})".strip()
            if explained:
                lines += textwrap.wrap(
                    doc, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
                )
            lines += filter(None, [line(full, name, value)])
    return lines + inner_lines


def toml_value(value: Any) -> str:
    """One value in TOML's syntax, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Table):
        value = value.model_dump()
    if isinstance(value, dict):
        pairs = (f"{_toml_key(name)} = {toml_value(item)}" for name, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    assert isinstance(value, int | float), value
    return repr(value)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)
