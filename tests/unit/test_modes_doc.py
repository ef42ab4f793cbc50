"""docs/modes.md: its table is that of experiments/modes_table.py, adds up, and keeps the bounds it promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import modes_table
from modes_table import HEADER, MODES, Mode
from rollover.config.load import load_config
from rollover.types import DropReason

TEXT = modes_table.DOC.read_text()
ROWS = {row["mode"]: row for row in modes_table.read_table(TEXT)}
MINE = '[model]\npath = "somewhere"\n[[tasks.sources]]\nkind = "dataset"\npath = "problems.jsonl"\n'

modes = pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])


def row_of(mode: Mode) -> dict[str, str]:
    return ROWS[f"[{mode.name}](#{mode.name})"]


def numbers(cell: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", cell)]


def number(cell: str) -> int:
    (found,) = numbers(cell)
    return found


def section(mode: Mode) -> str:
    found = re.search(rf"^### {mode.name}\n(.*?)(?=^##|\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found, f"docs/modes.md has no section {mode.name}"
    return found[1]


def test_the_table_has_every_mode_once_in_order() -> None:
    assert list(ROWS) == [f"[{mode.name}](#{mode.name})" for mode in MODES]
    assert all(tuple(row) == HEADER for row in ROWS.values())
    of_no_mode = {
        "quickstart.toml",
        "apr_qwen3_4b_2node.toml",
        "calculator.toml",
        "calculator_agent.toml",
        "code.toml",
        "dapo.toml",
        "dapo_qwen2.5_32b.toml",
        "grpo_kl.toml",
        "guess_number.toml",
        "ppo_gae.toml",
        "remax.toml",
        "solver_judge.toml",
        "vllm.toml",
    }
    assert sorted({mode.recipe for mode in MODES} - {""} | of_no_mode) == sorted(
        path.name for path in (modes_table.ROOT / "configs").glob("*.toml")
    )


@modes
def test_a_row_adds_up(mode: Mode) -> None:
    row = row_of(mode)
    assert row["ledger"] == "balanced"
    dropped = numbers(row["dropped"])
    assert number(row["generated"]) == number(row["trained"]) + sum(dropped) + number(row["held"])
    assert number(row["steps"]) == modes_table.STEPS <= number(row["groups trained"])
    assert set(re.findall(r"[a-z_]+", row["dropped"])) <= {reason.value for reason in DropReason}
    assert 0 <= number(row["resumed"].removesuffix("%")) <= 100


@modes
def test_the_bound_holds_and_is_that_of_the_configuration(mode: Mode, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(MINE)
    config = modes_table.resolve(mode, mine).config
    rollout, row = config.rollout, row_of(mode)
    assert number(row["staleness max"]) <= number(row["bound"]) == config.staleness_bound
    if rollout.complete_fraction == 1 and rollout.complete_by == "group":
        assert number(row["groups trained"]) == modes_table.STEPS * rollout.groups_per_step
    if rollout.nothing_rolls_over:
        assert number(row["resumed"].removesuffix("%")) == 0


@modes
def test_the_text_shows_the_settings_that_were_run(mode: Mode, tmp_path: Path) -> None:
    text = section(mode)
    if mode.recipe:
        assert f"configs/{mode.recipe}" in text
        return
    block = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert block
    shown = {key: value for key, value in re.findall(r"^(\w+) = ([^#\n]*?) *(?:#.*)?$", block[1], re.MULTILINE)}
    assert shown == {key: json.dumps(value) for key, value in mode.settings.items()}
    mine = tmp_path / "mine.toml"
    mine.write_text(f"{MINE}[rollout]\ngroups_per_step = 8\n{block[1]}")
    resolved = load_config([mine])
    assert resolved.notices == [] and "Cost:" in text
