"""The benchmarks run and print what they promise, at sizes of seconds; their figures are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from rollover import bench
from rollover.bench import engine, scale, tail, train
from rollover.config.load import load_config
from rollover.sim.workload import Workload


def report(capsys: pytest.CaptureFixture[str], what: str, folder: Path) -> dict:
    model = tiny.save(folder / "model")
    overrides = [("model.path", str(model)), ("run.threads", "1"), ("engine.kv_memory_gb", "0.2")]
    config = load_config([], overrides, require_sources=False).config
    assert bench.main(what, config, as_json=True, runs=2) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["machine"]["torch"] and out["machine"]["matmul_gflops"] > 0
    for result in out["results"]:
        promised = {"case", "system", "version", "setting", "tokens_per_s", "spread"}
        extras = {"peak_memory_gb", "predicted_tokens_per_s", "group_staleness_mean", "group_staleness_max"}
        assert set(result) - extras == promised
        low, high = result["spread"]
        # A step of a partial mode may need no new token.
        assert 0 <= low <= high and result["tokens_per_s"] > 0
    assert all(ratio > 0 for ratio in out["ratios"].values())
    return out


def test_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "NEW_TOKENS", 4)
    monkeypatch.setattr(engine.vllm_peer, "python", lambda: None)  # tests/integration/test_vllm_peer.py
    monkeypatch.setattr(engine, "_continuous", lambda model, vocab, num: None)  # needs attention kernels of its own
    ratios = report(capsys, "engine", tmp_path)["ratios"]
    assert {
        *(f"engine_{n}_vs_linear_bound" for n in (1, 32, 64, 256)),
        "engine_1_vs_generate", "engine_32_vs_generate", "engine_32_vs_continuous_batching",
    } <= set(ratios)  # fmt: skip


def test_train(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "GROUPS", 2)
    ratios = report(capsys, "train", tmp_path)["ratios"]
    assert set(ratios) == {"train_vs_linear_bound", "train_vs_transformers_padded", "train_shared_prompt_speedup"}


def test_tail(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "LONGEST", 64)
    monkeypatch.setattr(tail, "WORKLOAD", Workload(tail.PLAN, tail.SIZE, 64))
    ratios = report(capsys, "tail", tmp_path)["ratios"]
    assert {"tail_rollout_partial_vs_sync", "tail_step_vs_amdahl_bound"} <= set(ratios)


def test_scale(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "SEQUENCES", (1, 4))
    monkeypatch.setattr(scale, "CONTEXTS", (16, 128, 4096))
    monkeypatch.setattr(scale, "SAMPLES", (8, 16))
    cases = {result["case"] for result in report(capsys, "scale", tmp_path)["results"]}
    # The tiny model has 1024 positions: what does not fit is left out.
    assert cases == {f"decode_{n}_at_{c}" for n in (1, 4) for c in (16, 128)} | {"train_8", "train_16"}
