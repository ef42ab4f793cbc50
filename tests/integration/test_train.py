"""`rollover train` as a user runs it: what it leaves behind, Ctrl-C, resume, replay, LoRA, eval, sample."""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollover.track.metrics import validate
from rollover.track.trace import spans

REQUIRED = (
    "step", "policy_version", "reward/mean", "tokens/generated", "tokens/trained", "tokens/dropped", "tokens/held",
    "staleness/max", "time/generate_s", "time/score_s", "time/train_s", "time/weights_s", "time/checkpoint_s",
    "time/eval_s", "time/other_s", "time/step_s",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of 6 steps with evaluation."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = runs.write(folder, steps=6, eval={"num_tasks": 4, "samples_per_task": 2})
    done = runs.rollover("train", recipe)
    assert done.returncode == 0, done.stderr
    assert "Held-out tasks" in done.stdout and "step 6/6" in done.stdout
    assert f"rollover view {folder / 'run'}" in done.stdout.splitlines()[-1]
    return folder


def test_metrics_of_a_finished_run(finished: Path) -> None:
    rows = runs.rows(finished)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        validate(row)
        assert all(key in row for key in REQUIRED)
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["staleness/max"] <= row["staleness/bound"] == 2
        split = sum(
            row[f"time/{k}_s"]
            for k in ("generate", "score", "schedule", "train", "weights", "checkpoint", "eval", "other")
        )
        assert split == pytest.approx(row["time/step_s"], rel=1e-3)
        assert row["perf/mfu_train"] > 0 and row.get("perf/mfu_generate", 1) > 0
        peak = row["perf/peak_tflops"] * 1e12
        assert row["perf/train_flops"] == pytest.approx(row["perf/mfu_train"] * row["time/train_s"] * peak)
    assert any(row["rollouts/partial_share"] > 0 for row in rows)
    assert "perf/mfu_generate" in rows[0] and "engine/kernels" in rows[0]
    evals = runs.json_lines(finished / "run" / "eval.jsonl")
    assert [row["step"] for row in evals] == [0, 6]


def test_recorded_rollouts_match_the_metrics(finished: Path) -> None:
    rows = runs.rows(finished)
    trained = [r for r in runs.records(finished / "run") if r["outcome"] == "trained"]
    assert len(trained) == 6 * 3 * 3
    assert sum(len(r["token_ids"]) for r in trained) == rows[-1]["tokens/trained"]
    for record in trained:
        assert sum(s["num_tokens"] for s in record["segments"]) == len(record["token_ids"]) <= 48
        versions = [s["policy_version"] for s in record["segments"]]
        assert versions == sorted(versions) and record["step"] - 1 - versions[0] <= 2
    assert any(len({s["policy_version"] for s in r["segments"]}) >= 2 for r in trained)


def test_the_trace_is_the_runs_ledger(finished: Path) -> None:
    rows, events = runs.rows(finished), runs.trace(finished / "run")
    ends = [i for i, e in enumerate(events) if e.kind == "publish"]
    for row, end in zip(rows, ends, strict=True):
        told = events[: end + 1]
        generated = sum(e.tokens for e in told if e.kind in ("park", "finish"))
        assert generated == row["tokens/generated"]
        kinds = Counter(e.kind for e in told)
        assert kinds["admit"] == row["groups/admitted"] and kinds["consume"] == row["groups/consumed"]
        assert kinds["resume"] == row["rollouts/resumed"] and told[-1].version == row["step"]
    segments: dict[str, list[tuple[int, int]]] = {}
    for e in events:
        segments.setdefault(f"{e.group}-{e.sibling}", []).extend(e.segments)
    for record in runs.records(finished / "run"):
        recorded = [(s["policy_version"], s["num_tokens"]) for s in record["segments"]]
        assert segments[record["rollout_id"]] == recorded
    assert {s.name for s in spans(events)} == {"generate", "train", "weights", "checkpoint", "eval"}
    trained = sum(s.end - s.start for s in spans(events) if s.name == "train")
    assert trained == pytest.approx(sum(r["time/train_s"] for r in rows), rel=0.02, abs=2e-3)


def test_lifecycle_metrics_of_a_finished_run(finished: Path) -> None:
    rows, events = runs.rows(finished), runs.trace(finished / "run")
    at = {(e.kind, e.group): e for e in events if e.kind in ("admit", "ready", "consume")}
    for row in rows:
        in_flight, in_queue = row["staleness/in_flight_mean"], row["staleness/in_queue_mean"]
        assert in_flight + in_queue == pytest.approx(row["staleness/mean"]) and min(in_flight, in_queue) >= 0
        assert row["staleness/mean"] <= row["staleness/rollout_mean"] <= row["staleness/max"]
        groups = [g for kind, g in at if kind == "consume" and at[kind, g].version == row["step"] - 1]
        life = [at["consume", g].seconds - at["admit", g].seconds for g in groups]
        states = {k.removeprefix("state/").removesuffix("_s"): v for k, v in row.items() if k.startswith("state/")}
        assert states.keys() == {"waiting", "running", "parked", "scoring", "ready"}
        assert sum(states.values()) == pytest.approx(sum(life) / len(life), abs=1e-5)  # the file has microseconds
        waits = [at["consume", g].version - at["admit", g].version for g in groups]
        quarters = [row[f"bias/wait_steps_q{i}"] for i in (1, 2, 3, 4)]
        assert min(waits) <= min(quarters) and max(quarters) <= max(waits)
        assert row["waste/dropped_share"] == 0 and row["tokens/step_processed"] > row["tokens/step_generated"]
    again = sum(row["waste/reprefilled_tokens"] for row in rows)
    assert 0 < again == rows[-1]["engine/reprefill_tokens"]
    # What evaluations prefill is the engine's, not a step's.
    first = sum(r["tokens/step_processed"] - r["tokens/step_generated"] for r in rows) - again
    assert 0 < first < rows[-1]["engine/prefill_tokens"]
    assert 0 < sum(row["waste/reprefilled_s"] for row in rows) < rows[-1]["engine/prefill_s"]
    assert sum(row["waste/reprefilled_s"] for row in rows) < sum(row["time/generate_s"] for row in rows)


def test_trace_verb(finished: Path, tmp_path: Path) -> None:
    svg, perfetto = tmp_path / "run.svg", tmp_path / "run.json"
    done = runs.rollover("trace", finished / "run", "--svg", svg, "--perfetto", perfetto)
    assert done.returncode == 0, done.stderr
    num_segments = sum(len(e.segments) for e in runs.trace(finished / "run"))
    assert svg.read_text().count('class="bar ') >= num_segments
    assert len(json.loads(perfetto.read_text())["traceEvents"]) > num_segments
    done = runs.rollover("trace", finished / "run")
    assert done.returncode == 0 and "6 steps" in done.stdout, done.stderr
    refused = runs.rollover("trace", finished)
    assert (
        refused.returncode == 2 and "not the directory of a run" in refused.stderr and "Traceback" not in refused.stderr
    )


def test_final_model_is_the_trained_one(finished: Path) -> None:
    trained = AutoModelForCausalLM.from_pretrained(finished / "run" / "model")
    start = AutoModelForCausalLM.from_pretrained(finished / "model")
    tokenizer = AutoTokenizer.from_pretrained(finished / "run" / "model")
    assert tokenizer.decode(tokenizer("count to 7").input_ids) == "count to 7"
    different = [
        n for (n, a), b in zip(trained.named_parameters(), start.parameters(), strict=True) if not torch.equal(a, b)
    ]
    assert len(different) == len(list(start.parameters()))
    out = trained.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert out.shape[1] <= 7


def test_ctrl_c_parks_and_the_printed_command_resumes(tmp_path: Path) -> None:
    tmp_path = tmp_path / "with space"
    recipe = runs.write(tmp_path, steps=200, checkpoint={"every_steps": 0})
    process = runs.start("train", recipe)
    try:
        while len(runs.rows(tmp_path)) < 3:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.wait(600)
    finally:
        process.kill()
    output = process.out + process.err
    assert process.returncode == 130 and "Traceback" not in output, output
    printed = next(line.strip() for line in output.splitlines() if line.strip().endswith("--resume"))
    reached = runs.rows(tmp_path)[-1]["step"]
    words = shlex.split(printed)  # as a shell does: a path with a space must survive it
    assert words[1:4] == ["-m", "rollover", "train"]
    done = runs.rollover(*words[3:], "--train.num_steps", reached + 2)
    assert done.returncode == 0, done.stderr
    rows = runs.rows(tmp_path)
    assert [r["step"] for r in rows] == list(range(1, reached + 3))
    # What happened between the last step and the checkpoint is in both, so the trace keeps it.
    told = runs.trace(tmp_path / "run")
    assert sum(e.tokens for e in told if e.kind in ("park", "finish")) == rows[-1]["tokens/generated"]
    kinds = Counter(e.kind for e in told)
    assert kinds["admit"] == rows[-1]["groups/admitted"] and kinds["resume"] == rows[-1]["rollouts/resumed"]


def test_lora_run_with_bf16(tmp_path: Path) -> None:
    """Engine and trainer stay together: what was sampled at the weights of a step has their log-probs."""
    synchronous = {"interrupt": "never", "max_staleness": 0, "in_flight_groups": 3}
    recipe = runs.write(tmp_path, steps=3, model={"dtype": "bfloat16"}, rollout=synchronous, engine={"kind": "process"})
    done = runs.rollover("train", recipe, "--model.lora.rank", "4", "--train.learning_rate", "0.01")
    assert done.returncode == 0, done.stderr
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    end = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32).state_dict()
    changed = {n for n in start if not torch.allclose(start[n].bfloat16().float(), end[n])}
    assert changed and all("proj" in name for name in changed)
    rows = runs.rows(tmp_path)
    assert np.isfinite([r["loss"] for r in rows]).all()
    assert max(r["mismatch/logprob_abs_mean"] for r in rows) < 2e-4


def test_without_a_trace_and_a_journal(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, steps=2, track={"trace": False}, checkpoint={"journal_s": 0})
    done = runs.rollover("train", recipe)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "trace.jsonl").exists() and not (tmp_path / "run" / "journal").exists()
    assert not [key for row in runs.rows(tmp_path) for key in row if "journal/" in key]
    row = runs.rows(tmp_path)[-1]
    assert row["state/running_s"] > 0 and row["bias/trained_vs_dispatched_length"] > 0


def test_a_finite_stream_ends_the_run(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, steps=50, rows=14, tasks={"epochs": 1}, checkpoint={"every_steps": 0})
    done = runs.rollover("train", recipe)
    assert done.returncode == 0, done.stderr
    rows = runs.rows(tmp_path)
    assert rows[-1]["bias/trained_vs_dispatched_length"] == pytest.approx(1.0), "everything was trained"
    assert rows[-1]["tokens/held"] == 0 and rows[-1]["groups/consumed"] == rows[-1]["groups/admitted"] <= 14
    assert "used up" in done.stdout
