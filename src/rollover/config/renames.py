"""Keys of earlier versions: read with a notice until 0.2.0, in files, overrides, Python and run directories.

Owns the one table of old and new keys. `rollover config --upgrade FILE` rewrites a file by it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from rollover.config.table import ConfigError, put

RENAMED = {
    "run.replay_rollouts": "run.train_on_recorded",
    "algorithm.critic_learning_rate": "critic.head_learning_rate",
    "algorithm.value_clip": "critic.value_clip",
    "algorithm.off_policy_mask_threshold": "algorithm.off_policy_mask_above",
}
FORMER_NAMES = "The former name works until 0.2.0; `rollover config --upgrade FILE` rewrites a file"
# New values of old ones, where the meaning of a value changed with the key.
_VALUES: dict[str, Callable[[Any], Any]] = {
    "algorithm.off_policy_mask_threshold": lambda old: old or math.inf,  # 0 was off
}


def upgrade(tables: MutableMapping[str, Any]) -> list[str]:
    """Put today's keys in place of old ones, in nested tables; return a message for each.

    ConfigError where the new key is set as well.
    """
    messages = []
    for old, new in RENAMED.items():
        (owner, _, name), (new_owner, _, new_name) = old.rpartition("."), new.rpartition(".")
        if name not in _table(tables, owner) or not isinstance(tables.get(new_owner, {}), Mapping):
            continue
        if new_name in _table(tables, new_owner):
            raise ConfigError(f"{old} is the former name of {new}, which is set as well. Remove {old}")
        value = tables[owner].pop(name)
        put(tables, new, _VALUES[old](value) if old in _VALUES else value)
        messages.append(f"{old} is called {new} now")
    algorithm = _table(tables, "algorithm")
    if isinstance(name := algorithm.get("rejection"), str):  # the estimate; rejection_high was its bound
        bound = tables["algorithm"].pop("rejection_high", 0.1)
        tables["algorithm"]["rejection"] = {} if name == "none" else {name: bound}
        messages.append("algorithm.rejection is a table of bounds by estimate now, and replaces rejection_high")
    return messages


def upgraded(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested tables, such as a run's config.resolved.json, with today's keys."""
    tables = copy.deepcopy(dict(tables))
    upgrade(tables)
    return tables


def upgraded_text(text: str) -> tuple[str, list[str]]:
    """Return the text of a TOML file with today's keys, comments and layout kept, and a message for each change."""
    import tomlkit

    document = tomlkit.parse(text)
    messages = upgrade(document)
    return tomlkit.dumps(document), messages


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table of the tables; {} where it is missing, or no table."""
    table = tables.get(name)
    return table if isinstance(table, Mapping) else {}
