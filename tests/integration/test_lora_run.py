"""Runs that begin with the adapters of another: they generate with them from the first token on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs

from rollover import cli

SYNC = {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 0}


def train(folder: Path, base: Path, **lora: Any) -> list[dict[str, Any]]:
    """The rows of a run of 2 steps over that base model."""
    model = {"path": str(base), "dtype": "float32"}
    recipe = runs.write(folder, steps=2, rollout=SYNC, model=model, train={"learning_rate": 1e-2})
    words = [f"--model.lora.{key}={json.dumps(value)}" for key, value in {"rank": 4, **lora}.items()]
    assert cli.main(["train", str(recipe), *words]) == 0
    return runs.json_lines(folder / "run" / "metrics.jsonl")


@pytest.mark.parametrize("kind", [{}, {"dora": True}], ids=["lora", "dora"])
def test_a_run_samples_from_the_adapters_that_it_begins_with(kind: dict[str, Any], tmp_path: Path) -> None:
    lora: dict[str, Any] = {"target_modules": ["all-linear"], **kind}
    first = train(tmp_path / "first", tmp_path / "first" / "model", **lora)
    folder = tmp_path / "first" / "run" / "model" / "adapter"
    second = train(tmp_path / "second", tmp_path / "first" / "model", path=str(folder), **lora)
    for row in first + second:
        assert row["mismatch/logprob_abs_max"] < 1e-4, row["step"]
