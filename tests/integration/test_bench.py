"""The benchmarks run and print what they promise, at sizes of seconds; their figures are not judged here."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import runs

import benchmarks as bench
import tiny
from benchmarks import engine, machine, scale, step, tail, train
from rollover import cli
from rollover.config.load import load_config
from rollover.process_tree import descendants, is_running
from rollover.sim.workload import Workload


def report(capsys: pytest.CaptureFixture[str], what: str, folder: Path) -> dict:
    model = tiny.save(folder / "model")
    overrides = [("model.path", str(model)), ("run.threads", "1"), ("engine.kv_memory_gb", "0.2")]
    config = load_config([], overrides, require_sources=False).config
    assert bench.main(what, config, as_json=True, runs=2) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["machine"]["torch"] and out["machine"]["matmul_gflops"] > 0
    for result in out["results"]:
        rate = "samples_per_s" if what == "step" else "tokens_per_s"
        promised = {"case", "system", "version", "setting", rate, "spread"}
        mfu = {"engine": {"mfu"}, "train": {"mfu"}, "step": {"mfu_train", "mfu_generate"}}.get(what, set())
        ours = result["system"] == "rollover" and result["case"] != "shared_prompt"
        assert all(result[key] > 0 for key in mfu) if ours else not mfu & result.keys()
        extras = {
            "tokens",
            "peak_memory_gb",
            "predicted_tokens_per_s",
            "group_staleness_mean",
            "group_staleness_max",
            *mfu,
        }
        assert set(result) - extras == promised
        low, high = result["spread"]
        # A step of a partial mode may need no new token.
        assert 0 <= low <= high and result[rate] > 0
    assert all(ratio > 0 for ratio in out["ratios"].values())
    return out


def test_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "NEW_TOKENS", 4)
    monkeypatch.setattr(
        engine, "continuous_batching", lambda model, vocab, num: None
    )  # needs attention kernels of its own
    ratios = report(capsys, "engine", tmp_path)["ratios"]
    assert {
        *(f"engine_{n}_vs_linear_bound" for n in (1, 32, 64, 256)),
        "engine_1_vs_generate", "engine_32_vs_generate", "engine_32_vs_continuous_batching",
    } <= set(ratios)  # fmt: skip


def test_tail_of_160k_tokens_in_virtual_time(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial rollouts are faster than synchronous training, by the same factor on every machine."""
    monkeypatch.setattr(tail, "LONG_MODES", {name: tail.LONG_MODES[name] for name in ("sync", "partial_staleness_2")})
    assert cli.main(["bench", "tail", "--lengths", "160k", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["ratios"] == {"tail_160k_partial_staleness_2_vs_sync": pytest.approx(2.56, abs=0.01)}
    sync, partial = out["results"]
    assert partial["staleness_max"] == 2 and sync["staleness_max"] == 0
    assert partial["step_s"] < sync["step_s"] and partial["slots_idle"] < sync["slots_idle"]


def test_lengths_are_of_tail_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "engine", "--lengths", "160k"]) == 2
    assert "--lengths 160k: engine has no lengths to choose. Use it with tail" in capsys.readouterr().err


def test_train(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "GROUPS", 2)
    ratios = report(capsys, "train", tmp_path)["ratios"]
    assert set(ratios) == {"train_vs_linear_bound", "train_vs_transformers_padded", "train_shared_prompt_speedup"}


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> int:
    """Steps of seconds; returns how many tokens each trains."""
    for name, value in (("GROUPS", 2), ("SIZE", 4), ("NEW_TOKENS", 24), ("STEPS", 3)):
        monkeypatch.setattr(step, name, value)
    partial = [("rollout.in_flight_groups", "3"), ("rollout.interrupt", "when_enough"), ("rollout.max_staleness", "1")]
    monkeypatch.setattr(step, "PARTIAL", partial)
    monkeypatch.setattr(step, "answer_lengths", lambda: [[3, 24, 10, 17], [5, 2, 24, 9]])
    return 94


def tokens_of(out: dict) -> dict[tuple[str, str], list[int]]:
    return {(r["system"], r["setting"].split(",")[0]): r["tokens"] for r in out["results"]}


def test_step(capsys: pytest.CaptureFixture[str], tmp_path: Path, short_steps: int) -> None:
    """Every measured step has the same answer lengths; Ctrl-C and SIGTERM are the program's own again afterwards."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    out = report(capsys, "step", tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert set(out["ratios"]) == {"step_partial_vs_sync"}
    tokens = tokens_of(out)
    assert tokens.pop(("rollover", "partial")), "which of the groups are in a step differs here"
    assert tokens == {("rollover", "synchronous"): [short_steps] * 3}


def test_step_beside_trl(tmp_path: Path, short_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given the same answer lengths; what is ours comes from `bench step`."""
    pytest.importorskip("trl")
    import step_beside_trl

    ours = [step.result("rollover", "1", name, [step.Step(1.0, 0.5, short_steps)]) for name in ("sync", "partial")]
    monkeypatch.setattr(step, "run", lambda config, runs: {"results": ours, "ratios": {"step_partial_vs_sync": 1.0}})
    config = load_config([], [("model.path", str(tiny.save(tmp_path / "model")))], require_sources=False).config
    out = step_beside_trl.run(config, 2, micro_batch=4)
    assert tokens_of(out)["trl", "GRPOTrainer"] == [short_steps] * 3
    assert set(out["ratios"]) == {"step_partial_vs_sync", "step_vs_trl", "step_sync_vs_trl"}
    assert all(ratio > 0 for ratio in out["ratios"].values())


def small_engine_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NEW_TOKENS", 2), ("CASES", (1, 2)), ("GENERATE_CASES", ()), ("CONTINUOUS_CASE", 2)):
        monkeypatch.setattr(engine, name, value)
    monkeypatch.setattr(engine, "continuous_batching", lambda model, vocab, num: None)


def test_engine_measures_the_kind_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which has ended when the benchmark has."""
    small_engine_bench(monkeypatch)
    overrides = [("model.path", str(tiny.save(tmp_path / "model"))), ("engine.kind", "process")]
    runs.rollover("--help")  # the launcher starts, and stays
    before = descendants(os.getpid())
    seen: dict[psutil.Process, list[str]] = {}

    def look(text: str) -> None:
        seen.update({process: process.cmdline() for process in descendants(os.getpid()) - before})

    monkeypatch.setattr(machine, "progress", look)
    out = engine.run(load_config([], overrides, require_sources=False).config, 1)
    ours = [result for result in out["results"] if result["system"] == "rollover"]
    assert len(ours) == 2 and all(r["setting"].startswith("process engine; ") and r["mfu"] > 0 for r in ours)
    assert any("rollover.engine.process.child" in words for words in seen.values())
    assert not any(map(is_running, seen))


def test_engine_takes_another_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Peer:
        name, setting, version, cases = "peer", "elsewhere", "3", (2,)

        def decode(self, prompts: object, new_tokens: int) -> None:
            asked.append((len(list(prompts)), new_tokens))  # type: ignore[call-overload]

    asked: list[tuple[int, int]] = []
    small_engine_bench(monkeypatch)
    overrides = [("model.path", str(tiny.save(tmp_path / "model"))), ("engine.kv_memory_gb", "0.2")]
    out = engine.run(load_config([], overrides, require_sources=False).config, 1, [Peer()])
    assert asked == [(2, 2)] * 2 and {"engine_2_vs_peer", "engine_1_vs_linear_bound"} <= out["ratios"].keys()
    assert {r["version"] for r in out["results"] if r["system"] == "peer"} == {"3"}


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
