"""A run whose trainer is spread over ranks: what is generated, trained and written is what one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from safetensors.torch import load_file

from rollover.cli import main

KINDS = ("local", "ranks")
SEQUENTIAL = {"in_flight_groups": 3, "interrupt": "never", "max_staleness": None}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    for kind in KINDS:
        recipe = runs.write(
            tmp_path / kind,
            steps=3,
            rollout=SEQUENTIAL,
            run={"threads": 2 if kind == "ranks" else 1},
            algorithm={"kl_coef": 0.01},
            backend={"type": kind},
            train={"profile_steps": [2]},
            eval={"num_tasks": 4, "every_steps": 1, "temperature": 0.0},
            checkpoint={"keep": 1, "keep_best": True, "save_best_model": True},
        )
        assert main(["train", str(recipe)]) == 0
    logs = sorted(path.name for path in (tmp_path / "ranks" / "run" / "logs").iterdir())
    assert logs == ["rank-0.log", "rank-1.log"]
    profiles = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*/run/profile/*")}
    assert profiles.keys() == {"step-000002.json", "step-000002-rank-0.json", "step-000002-rank-1.json"}
    for name, profile in profiles.items():
        assert any(event.get("name") == "aten::mm" for event in profile["traceEvents"]), name
    local, ranks = rows(tmp_path / "local"), rows(tmp_path / "ranks")
    assert len(local) == len(ranks) == 3
    for ours, theirs in zip(ranks, local, strict=True):
        for key in ("loss", "grad_norm", "entropy", "kl/reference", "reward/mean"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-5), key
    assert ranks[-1]["grad_norm"] > 0 and ranks[-1]["kl/reference"] > 0
    means = [[row["mean"] for row in runs.json_lines(tmp_path / kind / "run" / "eval.jsonl")] for kind in KINDS]
    best = means[0].index(max(means[0]))
    assert means[0] == means[1] and len(means[0]) == 4
    for kind in KINDS:
        names = {path.name for path in (tmp_path / kind / "run" / "checkpoints").glob("step-*")}
        assert names == {"step-000003"} | ({f"step-{best:06d}"} if best else set())
    for folder in ("model", *(["best_model"] if best else [])):
        models = [load_file(tmp_path / kind / "run" / folder / "model.safetensors") for kind in KINDS]
        assert models[0].keys() == models[1].keys()
        for name, weight in models[0].items():
            torch.testing.assert_close(models[1][name], weight, atol=1e-5, rtol=0)
