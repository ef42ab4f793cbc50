"""Runs whose model is at a Tinker-compatible service: here one on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs

from rollover.cli import main
from tinker_service import DROP, KEY, FakeTinker, serving

pytest.importorskip("tinker", reason="the SDK of Tinker is not installed (the extra tinker)")
HOOKS = """
class EndsAtTwo:
    def on_step_end(self, row):
        assert row["step"] < 2, "no more"
"""
SYNC = {"in_flight_groups": None, "interrupt": None, "max_staleness": None}


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[FakeTinker, str]]:
    with pytest.MonkeyPatch.context() as patch, serving() as served:
        patch.setenv("TINKER_API_KEY", KEY)
        yield served


def recipe(folder: Path, url: str, mode: dict[str, Any], **tables: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "hooks.py").write_text(HOOKS)
    return runs.write(
        folder,
        steps=tables.pop("steps", 3),
        **{
            "model": {"dtype": None},
            "model.lora": {"rank": 4},
            "backend": {"type": "tinker", "base_model": "tiny", "url": url, "chunk_tokens": 4, "timeout_s": 30},
            "engine": {"kv_memory_gb": None},
            "train": {"micro_batch_tokens": None, "learning_rate": 0.01},
            "rollout": {"max_new_tokens": 6, "group_size": 2, **mode},
            "checkpoint": {"every_steps": 0},
            **tables,
        },
    )


def test_run_that_ends_early_goes_on_and_hides_the_key(tmp_path: Path, service: tuple[FakeTinker, str], capsys) -> None:
    fake, url = service
    straight, cut = (recipe(tmp_path / name, url, SYNC, eval={"num_tasks": 2}) for name in ("straight", "cut"))
    assert main(["train", str(straight)]) == 0
    assert main(["train", str(cut), "--run.hooks", f"{tmp_path}/cut/hooks.py:EndsAtTwo"]) == 2
    fake.faults = {"load_weights": [503], "asample": [429, DROP], "save_weights": [500]}
    assert main(["train", str(cut), "--resume"]) == 0
    assert not any(fake.faults.values())
    expected, found = (runs.json_lines(file.parent / "run" / "metrics.jsonl") for file in (straight, cut))
    for name in ("step", "loss", "grad_norm", "reward/mean", "length/mean", "learning_rate", "ratio/max"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], rel=1e-4, abs=1e-6), name
    for row in found:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["perf/train_flops"] > 0 and not {"entropy", "perf/mfu_train", "perf/peak_tflops"} & row.keys()
        assert abs(row["importance/mean"] - 1) < 1e-3, "the log-probs of sampler and trainer agree"
    said = "".join(capsys.readouterr())
    texts = [path.read_text(errors="replace") for path in (tmp_path / "cut").rglob("*") if path.is_file()]
    assert not any(KEY in text for text in [said, *texts])
    assert all(headers.get("X-API-Key") == KEY for headers in fake.headers) and not fake.named("telemetry")
    paths = json.loads((tmp_path / "cut" / "run" / "model" / "tinker.json").read_text())
    words = ["eval", str(cut), "--eval.num_tasks", "2", "--model"]
    assert main([*words, paths["sampler"]]) == 0
    assert main([*words, str(tmp_path / "cut" / "run" / "model")]) == 2
    assert "Give the path that it has the weights at" in capsys.readouterr().err


@pytest.mark.parametrize(
    "mode", [{"interrupt": "when_enough"}, {"overlap": True, "interrupt": "on_weight_update"}, {"stop": ["7"]}]
)
def test_it_runs_in_every_mode(mode: dict[str, Any], tmp_path: Path, service: tuple[FakeTinker, str]) -> None:
    assert main(["train", str(recipe(tmp_path, service[1], mode, steps=3))]) == 0
    rows = runs.rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert any(row["grad_norm"] > 0 for row in rows), "in one of them all pairs of siblings may have equal scores"
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"base_model": "tinier"}, "failed at making adapters over tinier: RequestFailedError"),
        ({"url": "http://127.0.0.1:9", "timeout_s": 0.5}, "there was no answer within backend.timeout_s"),
    ],
)
def test_what_cannot_be_is_said(
    changes: dict[str, Any], why: str,
    tmp_path: Path, service: tuple[FakeTinker, str], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = recipe(tmp_path, service[1], SYNC)
    words = [part for key, value in changes.items() for part in (f"--backend.{key}", str(value).lower())]
    assert main(["train", str(file), *words]) == 1
    error = capsys.readouterr().err
    assert why in error and "Traceback" not in error, error


def test_without_a_key_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    assert main(["train", str(recipe(tmp_path, "http://127.0.0.1:9", SYNC))]) == 2
    assert "needs the key of the service: set TINKER_API_KEY in the environment" in capsys.readouterr().err


def test_tasks_are_given_by_their_pass_rates(tmp_path: Path, service: tuple[FakeTinker, str]) -> None:
    curriculum = {"tasks.curriculum": {"kind": "buckets", "easy_weight": 0.0}}
    assert main(["train", str(recipe(tmp_path, service[1], SYNC, **curriculum))]) == 0
    (*_, last) = runs.rows(tmp_path)
    assert last["curriculum/known"] == last["curriculum/hard"] + last["curriculum/normal"] > 0


PRIVILEGED = """
def answer_told(task, messages):
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']} (The answer is {task.columns.get('answer', 7)}.)"}]
"""


@pytest.mark.parametrize("refresh_steps", [0, 2])
def test_opsd_run_reports_divergence_and_resumes(refresh_steps: int, tmp_path, service: tuple[FakeTinker, str]) -> None:
    distill = {"teacher": "policy", "refresh_steps": refresh_steps or None}
    file = recipe(tmp_path, service[1], SYNC, steps=4, distill=distill)
    (tmp_path / "prompts.py").write_text(PRIVILEGED)
    words = ["train", str(file), "--distill.privileged", f"{tmp_path}/prompts.py:answer_told"]
    assert main([*words, "--run.hooks", f"{tmp_path}/hooks.py:EndsAtTwo"]) == 2
    assert main([*words, "--resume"]) == 0
    rows = runs.rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["distill/kl"] != 0 and row["grad_norm"] > 0 and row["time/teacher_s"] > 0 for row in rows)
    saved = {asked["path"].split("-")[1] for asked in service[0].named("save_weights_for_sampler")
             if asked["path"].startswith("teacher-")}  # fmt: skip
    assert saved == ({"000002", "000004"} if refresh_steps else set())


def test_examples_are_trained_at_a_service(tmp_path: Path, service: tuple[FakeTinker, str]) -> None:
    path = recipe(tmp_path, service[1], SYNC, steps=6)
    rows = [{"prompt": f"count to {i}", "completion": "12345"} for i in range(8)]
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--sft.path", f"{tmp_path}/examples.jsonl", "--sft.eval_fraction", "0.3"]
    assert main(["sft", str(path), *words]) == 0
    made = runs.rows(tmp_path)
    assert made[-1]["sft/loss"] < made[0]["sft/loss"] and made[-1]["eval/sft_loss"] < made[0]["sft/loss"]
