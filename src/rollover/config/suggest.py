"""Messages about what a configuration names wrongly: which table, key or flag was meant.

Owns the rule of what is alike: a table is compared with tables, a key first with those of its own table, an option
first with those of its own verb; without a similar name no guess is made.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from rollover.config.schema import Config, leaves, names, tables
from rollover.config.table import row_of
from rollover.suggest import alike, similarity

_IN_ITS_TABLE = 0.65
_ELSEWHERE = 0.8
_TABLE = 0.75
_FLAG = 0.75
_OF_ANY_TABLE = {"name", "path", "dir", "size"}  # without its table such a word says nothing
_FEW_KEYS = 10
ALL_KEYS = "`rollover config FILE.toml` prints every key with its doc"


def unknown_table(key: str) -> str:
    """Return the error of an unknown [table]."""
    known = {name: f"[{name}]" for name, _ in tables()}
    known |= {name: f"[[{name}]]" for name, info in leaves() if row_of(info.annotation)}
    near = _near(key, known, _TABLE) or [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    if near:
        return f"unknown table [{key}]. Did you mean {' or '.join(known[name] for name in near)}?"
    return f"unknown table [{key}]. The tables are {', '.join(f'[{name}]' for name in Config.model_fields)}"


def unknown_key(key: str) -> str:
    """Return the error of an unknown key: with the nearest key of its table, else of another."""
    table, _, name = key.rpartition(".")
    for array, info in leaves():
        if (row := row_of(info.annotation)) and array.rpartition(".")[0] == table and name in row.model_fields:
            return f"unknown key {key}. Did you mean {name} in [[{array}]]?"
    index = re.search(r"\.(\d+)(?:\.|$)", key)
    near = near_keys(key, names((int(index[1]),) if index else ()))
    if near:
        return f"unknown key {key}. Did you mean {' or '.join(near)}?"
    if not table and (near := _near(key, Config.model_fields, _TABLE)):
        return f"unknown key {key}. Did you mean the table [{near[0]}]?"
    own = [last for of, _, last in (known.rpartition(".") for known in names()) if table and of == table]
    hint = f"[{table}] has {', '.join(own)}" if 0 < len(own) <= _FEW_KEYS else ALL_KEYS
    return f"unknown key {key}, and none is like it. {hint}"


def near_keys(key: str, known: Collection[str]) -> list[str]:
    """At most two of the dotted keys `known` that `key`, with or without its table, may have meant; best first."""
    table, _, name = key.rpartition(".")
    by_table: dict[str, list[str]] = {}
    for full in known:
        owner, _, last = full.rpartition(".")
        by_table.setdefault(owner, []).append(last)
    if table and table not in by_table:
        table = next(iter(_near(table, by_table, _TABLE)), table)
    for owner in (table,) if table in by_table else ():
        found = [name] if name in by_table[owner] else _near(name, by_table[owner], _IN_ITS_TABLE)
        found = found or [last for last in by_table[owner] if name in last.split("_")]
        if 0 < len(found) <= 2:
            return [f"{owner}.{last}" if owner else last for last in found]
    same = [full for full in known if full.rpartition(".")[2] == name]
    if same:
        return [] if table and name in _OF_ANY_TABLE else same[:2]
    near = _near(name, {full.rpartition(".")[2] for full in known}, _ELSEWHERE)
    return [full for last in near for full in known if full.rpartition(".")[2] == last][:2]


def unknown_flags(words: Iterable[str], options: Collection[str], keys: bool = True) -> str:
    """Return the error of unknown command-line words. `options`: of the verb. `keys`: whether it takes keys."""
    words = list(words)
    flag = next((word for word in words if word.startswith("-")), None)
    if flag is None:
        return f"unexpected arguments: {' '.join(words)}"
    flag = flag.partition("=")[0]
    near = _near(flag, options, _FLAG)
    if keys:
        near = near or [f"--{key}" for key in near_keys(flag.lstrip("-").replace("-", "_"), names())]
    if near:
        return f"unknown option {flag}. Did you mean {' or '.join(near)}?"
    has = f"{ALL_KEYS}; each can be set as --table.key VALUE" if keys else f"There are {', '.join(options)}"
    return f"unknown option {flag}. {has}"


def _near(name: str, known: Iterable[str], cutoff: float) -> list[str]:
    """Up to two of `known`, best first: alike as strings, or begun by `name`."""
    known = list(known)
    found = alike(name, known, 2, cutoff)
    if len(found) == 2 and similarity(name, found[0]) - similarity(name, found[1]) > 0.1:
        found.pop()
    return found or [k for k in known if len(name) >= 4 and k.startswith(name)][:2]
