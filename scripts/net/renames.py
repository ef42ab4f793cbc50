"""Names that changed since the net was made (commit 916f4e6a): one table for every kind of name.

A recipe is written with the names of that commit. `recipe` turns it into one of this tree; the tables turn what an
earlier tree wrote into what this one writes. Every table maps names of that first commit to names of today, so that an
earlier tree with its own copy of this file can be compared, too. The file imports nothing of the repository. The new
name "" means that a name is gone on purpose.
"""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, str] = {}  # "table.key": "table.key"
METRICS: dict[str, str] = {}  # keys of metrics.jsonl
RECORDS: dict[str, str] = {}  # keys of rollouts/step-*.jsonl, at every depth
TENSORS: dict[str, str] = {}  # "file:tensor" of the saved model and of checkpoints; "file:" for a whole file
CODE: dict[str, str] = {}  # parts of the Python files of a recipe, such as module paths

NEW_METRICS: set[str] = set()  # that the earlier tree did not write
NEW_RECORDS: set[str] = set()


def recipe(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the tables of a recipe under the names of this tree. Add here what a rename cannot express."""
    out = {table: dict(values) for table, values in tables.items()}
    for old, new in CONFIG.items():
        table, _, key = old.rpartition(".")
        if key in out.get(table, {}):
            value = out[table].pop(key)
            if new:
                table, _, key = new.rpartition(".")
                out.setdefault(table, {})[key] = value
    return out
