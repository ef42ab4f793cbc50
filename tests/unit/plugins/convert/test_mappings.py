"""Every row of every mapping: our names exist, and the option changes the resolved run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from docs_conversions import in_document

from options_beside import BESIDE
from rollover.config.load import load_config
from rollover.config.schema import field_at
from rollover.config.table import value_of
from rollover.plugins.convert.conversion import SYSTEMS
from rollover.plugins.convert.mapping import Row, System, convert

DOCUMENT = Path(__file__).parents[4] / "docs" / "coming-from.md"
ROWS = [(system, row) for system in SYSTEMS.values() for row in system.rows]
WITH_OURS = [pytest.param(system, row, id=f"{system.name}-{row.option}") for system, row in ROWS if row.keys]
WITHOUT = [pytest.param(system, row, id=f"{system.name}-{row.option}") for system, row in ROWS if not row.keys]


def resolved(system: System, options: dict[str, Any]) -> Any:
    done = convert(system, options)
    assert not done.questions.keys() - {row.option for row in system.rows if row.example is None}
    return load_config([{key: value for key, (value, _) in done.values.items()}]).config


@functools.cache
def plain(name: str) -> Any:
    return resolved(SYSTEMS[name], dict(SYSTEMS[name].base))


@pytest.mark.parametrize(("system", "row"), WITH_OURS)
def test_every_key_exists_and_changes_the_resolved_run(system: System, row: Row) -> None:
    base = dict(system.base) | BESIDE.get((system.name, row.option), {})
    if row.example is None:
        assert convert(system, base | {row.option: "some value"}).questions[row.option]
        assert all(field_at(key) is not None for key in row.keys)
        return
    before = resolved(system, base) if (system.name, row.option) in BESIDE else plain(system.name)
    after = resolved(system, base | {row.option: row.example})
    changed = set()
    for key in row.keys:
        assert field_at(key) is not None, key
        if value_of(before, key) != value_of(after, key):
            changed.add(key)
    assert changed


@pytest.mark.parametrize(("system", "row"), WITHOUT)
def test_options_without_counterpart_have_a_reason(system: System, row: Row) -> None:
    assert row.note
    option = row.option.replace("*", "x")
    done = convert(system, dict(system.base) | {option: "some value"})
    assert (done.left_out if row.neutral is None else done.questions)[option] == row.note


def test_docs_tables_match_the_rows() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(f"<!-- table: {name} -->" in text for name in SYSTEMS)
    assert "<!-- table: differences -->" in text
    assert in_document(DOCUMENT) == text, "run: python scripts/docs_conversions.py docs/coming-from.md"
