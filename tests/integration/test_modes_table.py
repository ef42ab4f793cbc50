"""Every mode and recipe through the real loop, as experiments/modes_table.py runs them for docs/modes.md, shorter."""

from __future__ import annotations

from pathlib import Path

import pytest

import modes_table
from modes_table import MODES, Mode

SIZES = {"group_size": 4, "max_new_tokens": 64}


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return modes_table.prepare(tmp_path_factory.mktemp("modes"), steps=4, group_size=SIZES["group_size"])


ALL = [*MODES, Mode("quickstart", recipe="quickstart.toml")]


@pytest.mark.parametrize("mode", ALL, ids=[mode.name for mode in ALL])
def test_a_short_run(mode: Mode, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes_table, "SIZES", modes_table.SIZES | SIZES)
    row = modes_table.run_mode(mode, mine, mode.name)
    assert row["steps"] == 4 and row["ledger"] == "balanced"
    assert row["staleness max"] <= row["bound"]
    # Asynchronous ones interrupt nothing for a step; how far they run ahead is a matter of timing.
    if mode.name not in ("sync", "prefetch", "one_step_off", "fully_async", "axolotl_async"):
        assert row["resumed"] != "0%", "nothing rolled over"
