"""Wrong input ends with exit code 2 and a message that names the field and the fix; a full disk with exit code 1."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
import safetensors.torch
from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

from rollover import cli


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    try:
        code = cli.main([str(w) for w in words])
    except SystemExit as stop:
        code = int(stop.code or 0)
    error = capsys.readouterr().err
    assert "Traceback" not in error, error
    return code, error


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return runs.write(tmp_path, steps=2, checkpoint={"every_steps": 1})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train.num_steps", "many"], "train.num_steps"),
        (["--run.train_on_recorded", "/nowhere"], "run.train_on_recorded"),
        (["--model.path", "/nowhere"], "model.path"),
        (["--rewards.function", "no_such_module:f"], "no_such_module"),
        (["--engine.kv_memory_gb", "0.00001"], "engine.kv_memory_gb"),
        (["--model.device", "cuda:7"], "model.device"),
    ],
)
def test_wrong_values(recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, error = run(capsys, "train", recipe, *words)
    assert code == 2 and message in error, error


def test_a_folder_that_is_no_model(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    code, error = run(capsys, "train", recipe, "--model.path", tmp_path / "empty")
    assert code == 2 and "model.path" in error and "config.json" in error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise RuntimeError('broken on purpose')", "broken on purpose"),
        ("return [1.0] * (len(completions) + 1)", "2"),
        ("while True: pass", "timeout"),
        ("import os; os._exit(3)", "died"),
    ],
)
def test_reward_that_fails_its_probe(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, message: str
) -> None:
    (tmp_path / "bad.py").write_text(f"def reward(prompts, completions, **columns):\n    {body}\n")
    words = ["--rewards.timeout_s", "1"] if message == "timeout" else []
    code, error = run(capsys, "train", recipe, "--rewards.function", f"{tmp_path / 'bad.py'}:reward", *words)
    assert code == 2 and "reward" in error, error
    assert message in error or "exit" in error, error


def test_full_disk_keeps_the_old_checkpoint(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, "train", recipe, "--train.num_steps", "1")[0] == 0
    plain = safetensors.torch.save_file

    def full(tensors: dict, path: str) -> None:
        if "trainer-exp_avg" in path:
            raise OSError(28, "No space left on device")
        plain(tensors, path)

    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", full)
        code, error = run(capsys, "train", recipe, "--resume", "--train.num_steps", "3")
    assert code == 1 and "No space left" in error and "step-000002" in error
    folder = tmp_path / "run" / "checkpoints"
    assert [p.name for p in folder.iterdir()] == ["step-000001"]
    code, error = run(capsys, "train", recipe, "--resume", "--train.num_steps", "3")
    assert code == 0, error


def test_a_run_goes_on_where_a_generator_fails_now_and_then(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ChainSumDataset.__getitem__

    def fails(self: ChainSumDataset, idx: int) -> dict:
        if idx % 2:
            raise RuntimeError("no sum found")
        return plain(self, idx)

    monkeypatch.setattr(ChainSumDataset, "__getitem__", fails)
    rows = recipe.read_text().partition("[[tasks.sources]]")[0]
    recipe.write_text(f'{rows}[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n')
    assert cli.main(["train", str(recipe), "--eval.num_tasks", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "problems beside these could not be made" in said
    assert "/1: the generator chain_sum with {} raised RuntimeError: no sum found: it is left out" in said
    failed = [row["tasks/failed"] for row in runs.json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert 0 < failed[0] < failed[1]
