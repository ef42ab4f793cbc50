"""A run directory that an earlier version left, in the golden folder, goes on: its checkpoint, its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import runs
from endings import train
from runs import check_whole

import tiny

GOLDEN = Path(__file__).parents[1] / "golden" / "run-format-1"
# What it was trained with, to step 2 of 4; then its checkpoint held 5 groups, and 2 were kept to be replayed.
SMALL = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
SETTINGS = dict(
    checkpoint={"every_steps": 2, "keep": 1, "save_final_model": False},
    algorithm={"correction": "token_truncate"},
    rollout={"max_new_tokens": 48},
    replay={"size": 2, "max_staleness": 4},
    reroll={"max_groups": 1, "start_fraction": 0.0, "failed_at_most": 0.0},
    eval={"num_tasks": 0},
)


def write(steps: int) -> Path:
    """The recipe, in the current folder, where it was trained, too: its paths are relative."""
    tiny.save(Path("model"), num_key_value_heads=1, **SMALL)
    return runs.write(Path(), steps=steps, **SETTINGS)


def test_it_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN, tmp_path / "run")
    state = json.loads((GOLDEN / "checkpoints" / "step-000002" / "state.json").read_text())
    held = {g["group_id"]: [r["state"] for r in g["rollouts"]] for g in state["cache"]["groups"]}
    assert any("parked" in states for states in held.values()) and state["reuse"]["buffer"]["groups"]
    code, text = train(capsys, write(steps=4), "--resume")
    assert code == 0 and "resumed from step-000002" in text, text
    check_whole(tmp_path / "run", 4)
    left = {r["group_id"] for r in runs.records(tmp_path / "run")}
    assert held.keys() <= left, "what it held was trained"
