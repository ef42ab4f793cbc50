"""run.threads: a run with "auto" trains and generates as it should, and with a number it is the same run every time."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import busy_machine
import numpy as np
import pytest
import runs
import safetensors.numpy

import tiny
from rollover.cli import main
from rollover.config import RunConfig
from rollover.processes import brief_waiting
from rollover.system import cores

SYNC = {"in_flight_groups": None, "interrupt": "never", "max_staleness": None}
AHEAD = {"overlap": True, "in_flight_groups": 6, "max_staleness": 1, "interrupt": "on_weight_update"}


def train(folder: Path, threads: int | str, **tables: Any) -> list[dict[str, float]]:
    assert main(["train", str(runs.write(folder, steps=2, run={"threads": threads}, **tables))]) == 0
    return runs.json_lines(folder / "run" / "metrics.jsonl")


@pytest.mark.parametrize(
    "tables",
    [
        {"rollout": SYNC},
        {"rollout": AHEAD, "engine": {"kind": "process"}},
        {"rollout": SYNC, "train": {"streaming_min_groups": 1}},
    ],
    ids=["synchronous", "beside generation", "streaming"],
)
def test_auto_trains_and_generates(tmp_path: Path, tables: dict[str, Any]) -> None:
    rows = train(tmp_path, "auto", **tables)
    assert len(rows) == 2 and np.isfinite([row["loss"] for row in rows]).all()
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["mismatch/logprob_abs_max"] < 1e-3 or tables["rollout"] is AHEAD, "both compute the same"
        assert 1 <= row["train/threads"] <= cores()
    assert all(1 <= row["engine/threads"] <= cores() for row in rows if "engine/threads" in row)
    assert "engine/threads" in rows[-1] or "engine/threads" in rows[0]
    assert rows[-1]["engine/decode_s"] <= rows[-1]["engine/decode_thread_s"] <= cores() * rows[-1]["engine/decode_s"]


def test_a_number_is_that_number_and_the_same_run_every_time(tmp_path: Path) -> None:
    """fp32: no bit of the weights differs."""
    weights = []
    for name in ("one", "other"):
        rows = train(tmp_path / name, 2, rollout=SYNC)
        assert all(row["train/threads"] == row["engine/threads"] == 2 for row in rows)
        weights.append(safetensors.numpy.load_file(next((tmp_path / name / "run" / "model").glob("*.safetensors"))))
    one, other = weights
    assert one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def test_how_threads_wait_reaches_the_openmp_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GNU's prints what it has read, when it is loaded."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    recipe = runs.write(tmp_path, run={"threads": None})
    environment = runs.environment() | {"OMP_DISPLAY_ENV": "verbose"}
    words = runs.command(
        "sample", recipe, "--prompt", "count", "--rollout.max_new_tokens", "4", "--run.threads", "auto"
    )
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch has another OpenMP library than GNU's")
    spins = brief_waiting(RunConfig(threads="auto"))["GOMP_SPINCOUNT"]
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("decode",), ("decode", "train")], ids=str)
def test_the_script_for_a_busy_machine_compares_both_ways(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """Its speeds are not tested."""
    tiny.save(tmp_path / "model")
    words = ["--model", str(tmp_path / "model"), "--beside", "0", "1", "--runs", "1", "--what", *kinds]
    args = busy_machine.arguments(words)
    args.seconds = args.settle_s = 0.1
    said: list[dict[str, Any]] = []
    results = busy_machine.measure(args, said.append)
    assert [(r["beside"], r["what"], r["way"]) for r in results] == [
        (num, kind, way) for num in (0, 1) for kind in kinds for way in ("fixed", "auto")
    ]
    assert all(len(r["runs"]) == 1 and r["tokens_per_s"] > 0 for r in results)
    assert all(r["threads"] == cores() for r in results if r["way"] == "fixed")
    ratios = busy_machine.ratios(results)
    assert ratios["decode_fixed_beside_0"] == 1 and ratios[f"{kinds[-1]}_auto_beside_1"] > 0
