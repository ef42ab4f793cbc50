"""`rollover train` as a user runs it: what it leaves behind, Ctrl-C, resume, replay, LoRA, eval, sample."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from rollover.track.metrics import validate

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
    return folder


def test_metrics_of_a_finished_run(finished: Path) -> None:
    rows = runs.json_lines(finished / "run" / "metrics.jsonl")
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
    assert any(row["rollouts/partial_share"] > 0 for row in rows)
    evals = runs.json_lines(finished / "run" / "eval.jsonl")
    assert [row["step"] for row in evals] == [0, 6]


def test_recorded_rollouts_match_the_metrics(finished: Path) -> None:
    rows = runs.json_lines(finished / "run" / "metrics.jsonl")
    trained = [r for r in runs.records(finished / "run") if r["outcome"] == "trained"]
    assert len(trained) == 6 * 3 * 3
    assert sum(len(r["token_ids"]) for r in trained) == rows[-1]["tokens/trained"]
    for record in trained:
        assert sum(s["num_tokens"] for s in record["segments"]) == len(record["token_ids"]) <= 48
        versions = [s["policy_version"] for s in record["segments"]]
        assert versions == sorted(versions) and record["step"] - 1 - versions[0] <= 2
    assert any(len({s["policy_version"] for s in r["segments"]}) >= 2 for r in trained)


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


def test_resolved_config_is_written(finished: Path) -> None:
    config = json.loads((finished / "run" / "config.resolved.json").read_text())
    assert config["rollout"]["in_flight_groups"] == 8 and config["rollout"]["on_stale"] == "finish_first"


def test_a_second_run_does_not_overwrite_the_first(finished: Path) -> None:
    again = runs.rollover("train", finished / "recipe.toml")
    assert again.returncode == 2 and "--resume" in again.stderr and "Traceback" not in again.stderr


def test_replayed_rollouts_train_the_same_model(finished: Path, tmp_path: Path) -> None:
    """The recorded rollouts of a run, trained without generating, give the same final weights bit for bit."""
    recipe = runs.write(tmp_path, steps=6)
    done = runs.rollover("train", recipe, "--run.replay_rollouts", str(finished / "run" / "rollouts"))
    assert done.returncode == 0, done.stderr
    a = AutoModelForCausalLM.from_pretrained(finished / "run" / "model").state_dict()
    b = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_eval_and_sample(finished: Path) -> None:
    done = runs.rollover(
        "eval", finished / "recipe.toml", "--eval.num_tasks", "5", "--model", finished / "run" / "model", "--json"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert 0 <= result["mean"] <= 1 and "pass@1" in result and len(result["ci"]) == 2 and "tasks" in result["sources"]
    done = runs.rollover("sample", finished / "recipe.toml", "--prompt", "hello", "--num", "2")
    assert done.returncode == 0 and "--- 2 of 2" in done.stdout, done.stderr


def test_ctrl_c_parks_and_the_printed_command_resumes(tmp_path: Path) -> None:
    tmp_path = tmp_path / "with space"
    recipe = runs.write(tmp_path, steps=200, checkpoint={"every_steps": 0})
    process = subprocess.Popen(
        runs.command("train", recipe),
        env=runs.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while len(runs.json_lines(tmp_path / "run" / "metrics.jsonl")) < 3:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in output, output
    printed = next(line.strip() for line in output.splitlines() if line.strip().endswith("--resume"))
    reached = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    # As a user pastes it; a path with a space must survive the shell.
    done = subprocess.run(
        f"{printed} --train.num_steps {reached + 2}", shell=True, env=runs.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [r["step"] for r in runs.json_lines(tmp_path / "run" / "metrics.jsonl")] == list(range(1, reached + 3))


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """fp32, one thread, synchronous: stopping at step 2 and resuming changes no bit of the final weights."""
    sync = {"in_flight_groups": 3, "interrupt": "never", "max_staleness": 0}
    whole = runs.write(tmp_path / "whole", steps=4, rollout=sync)
    assert runs.rollover("train", whole).returncode == 0
    cut = runs.write(tmp_path / "cut", steps=4, rollout=sync)
    assert runs.rollover("train", cut, "--train.num_steps", "2").returncode == 0
    resumed = runs.rollover("train", cut, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    a = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "run" / "model").state_dict()
    b = AutoModelForCausalLM.from_pretrained(tmp_path / "cut" / "run" / "model").state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    first = runs.records(tmp_path / "whole" / "run")
    second = runs.records(tmp_path / "cut" / "run")
    assert [r["token_ids"] for r in first] == [r["token_ids"] for r in second]


def test_lora_run_with_bf16(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, steps=3, model={"dtype": "bfloat16"})
    done = runs.rollover("train", recipe, "--model.lora.rank", "4", "--train.learning_rate", "0.01")
    assert done.returncode == 0, done.stderr
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    end = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32).state_dict()
    changed = {n for n in start if not torch.allclose(start[n].bfloat16().float(), end[n])}
    assert changed and all("proj" in name for name in changed)
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert np.isfinite([r["loss"] for r in rows]).all()


def test_a_finite_stream_ends_the_run(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, steps=50, rows=14, tasks={"epochs": 1}, checkpoint={"every_steps": 0})
    done = runs.rollover("train", recipe)
    assert done.returncode == 0, done.stderr
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["tokens/held"] == 0 and rows[-1]["groups/consumed"] == rows[-1]["groups/admitted"] <= 14
    assert "used up" in done.stdout


def test_profile_is_written(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, steps=1, checkpoint={"every_steps": 0})
    done = runs.rollover("train", recipe, "--train.profile_steps", "[1]")
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "run" / "profile" / "step-000001.json").read_text())
    assert trace["traceEvents"]


def test_quickstart_recipe_resolves() -> None:
    done = runs.rollover("config", runs.REPOSITORY / "configs" / "quickstart.toml", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rollout"]["interrupt"] == "when_enough"


def test_tiny_tokenizer_round_trip() -> None:
    assert tiny.tokenizer().decode(tiny.tokenizer()("a b\n1").input_ids) == "a b\n1"
