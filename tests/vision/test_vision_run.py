"""Whole runs on image files: every family trains a step, a killed run goes on, and a changed image is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from rollover.cli import main
from rollover.compat.trl import GRPOConfig, GRPOTrainer
from vision import families

SYNCHRONOUS = {"in_flight_groups": 3, "max_staleness": 0, "interrupt": "never"}
KILLED_AT = Path(runs.__file__).with_name("killed_at.py")


def write(folder: Path, family: str, *, steps: int, **tables: Any) -> Path:
    """A recipe whose tasks show one image, or two, of several sizes."""
    families.write(family, folder / "model")
    recipe = runs.write(folder, steps=steps, **{"engine": {"kv_memory_gb": 0.1, "max_running": 8}, **tables})
    random, rows = np.random.default_rng(0), []
    for number in range(12):
        size = (24, 16 + 8 * (number % 3), 3)
        Image.fromarray(random.integers(0, 256, size, dtype=np.uint8)).save(folder / f"{number}.png")
    for number in range(40):
        shown = [f"{number % 12}.png", f"{(number + 5) % 12}.png"][: 1 + number % 2]
        parts: list[dict[str, str]] = [{"type": "image", "image": name} for name in shown]
        parts.append({"type": "text", "text": f"what is {number}?"})
        rows.append({"prompt": [{"role": "user", "content": parts}], "answer": str(number)})
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        'def reward(prompts, completions, **columns):\n    return [len(c[0]["content"]) % 5 / 4 for c in completions]\n'
    )
    return recipe


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the saved model, which transformers loads with its processor."""
    AutoProcessor.from_pretrained(folder)
    return AutoModelForImageTextToText.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("family", families.FAMILIES)
def test_it_trains_a_step_from_image_files(tmp_path: Path, family: str) -> None:
    recipe = write(tmp_path, family, steps=1)
    assert main(["train", str(recipe)]) == 0
    (row,) = runs.rows(tmp_path)
    assert row["mismatch/logprob_abs_max"] < 1e-5 and row["grad_norm"] > 0 and row["tokens/trained"] > 0
    before, after = loaded(tmp_path / "model"), loaded(tmp_path / "run" / "model")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any("vision" in name or "visual" in name or "projector" in name for name in changed)


def test_ranks_train_what_one_process_trains(tmp_path: Path) -> None:
    """Two, of which one may have no image in a micro-batch."""
    found = []
    for kind in ("local", "ranks"):
        recipe = write(tmp_path / kind, "qwen3_vl", steps=2, backend={"type": kind}, rollout=SYNCHRONOUS)
        assert main(["train", str(recipe)]) == 0
        found.append([(row["loss"], row["grad_norm"], row["reward/mean"]) for row in runs.rows(tmp_path / kind)])
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_a_trained_tower_is_trained_and_handed_over(tmp_path: Path, family: str) -> None:
    recipe = write(tmp_path, family, steps=3, rollout=SYNCHRONOUS)
    assert main(["train", str(recipe), "--model.vision", "trained"]) == 0
    assert all(row["mismatch/logprob_abs_max"] < 1e-5 for row in runs.rows(tmp_path)), (
        "the engine has the tower's weights"
    )
    before, after = loaded(tmp_path / "model"), loaded(tmp_path / "run" / "model")
    assert any(not torch.equal(before[name], after[name]) for name in before if "vision" in name or "visual" in name)


def test_an_image_that_changed_ends_a_resumed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write(tmp_path, "qwen2_5_vl", steps=2)
    assert main(["train", str(recipe)]) == 0
    for number in range(12):
        Image.new("RGB", (24, 24), "red").save(tmp_path / f"{number}.png")
    assert main(["train", str(recipe), "--resume", "--train.num_steps", "4"]) == 2
    assert "has changed since" in capsys.readouterr().err


def test_a_script_for_trl_shows_images(tmp_path: Path) -> None:
    families.write("qwen2_5_vl", tmp_path / "model")
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (16, 24, 3), dtype=np.uint8)) for _ in range(8)]
    rows = [{"prompt": [{"role": "user", "content": "what?"}], "image": image} for image in images]
    trainer = GRPOTrainer(
        str(tmp_path / "model"),
        lambda completions, **columns: [len(c[0]["content"]) % 5 / 4 for c in completions],
        args=GRPOConfig(
            str(tmp_path / "out"), max_steps=1, num_generations=4, per_device_train_batch_size=8,
            gradient_accumulation_steps=1, max_completion_length=12, bf16=False, use_cpu=True, report_to="none",
        ),
        train_dataset=rows,
    )  # fmt: skip
    trainer.train()
    assert [row["step"] for row in trainer.state.log_history if "reward" in row] == [1]
    (config,) = (tmp_path / "out").rglob("config.resolved.json")
    assert json.loads(config.read_text())["model"]["vision"] == "trained"
    assert len(list((tmp_path / "out").rglob("media/*.png"))) == 2, "those that the step showed"


def examples(folder: Path, answers: list[str]) -> list[str]:
    """Rows of one text about different images of one name. Returns the words of `rollover sft` for them."""
    families.write("qwen2_5_vl", folder / "model")
    random, rows = np.random.default_rng(0), []
    for number, answer in enumerate(answers):
        (folder / str(number)).mkdir()
        Image.fromarray(random.integers(0, 256, (16, 24, 3), dtype=np.uint8)).save(folder / str(number) / "image.png")
        parts = [{"type": "image", "image": f"{number}/image.png"}, {"type": "text", "text": "what?"}]
        rows.append({"prompt": [{"role": "user", "content": parts}], "completion": answer})
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {
        "run.dir": folder / "run", "run.threads": 1, "model.path": folder / "model", "model.dtype": "float32",
        "sft.path": folder / "examples.jsonl", "sft.batch_examples": 4, "sft.eval_fraction": 0.5,
        "train.num_steps": 6, "train.learning_rate": 3e-3, "rollout.max_new_tokens": 8, "engine.kv_memory_gb": 0.1,
    }  # fmt: skip
    (folder / "sft.toml").write_text('[run]\nname = "sft"\n')
    return [str(folder / "sft.toml"), *(part for key, value in words.items() for part in (f"--{key}", str(value)))]


def test_sft_trains_on_images_and_holds_some_out(tmp_path: Path) -> None:
    words = examples(tmp_path, [f"it is {number}" for number in range(12)])
    assert main(["sft", *words, "--model.vision", "trained"]) == 0
    losses = [row["sft/loss"] for row in runs.rows(tmp_path)]
    assert losses[-1] < losses[0]
    held_out = runs.rows(tmp_path)[-1]["eval/sft_loss"]
    assert 0 < held_out < 10
    before, after = loaded(tmp_path / "model"), loaded(tmp_path / "run" / "model")
    assert any(not torch.equal(before[name], after[name]) for name in before if "visual" in name)


def test_sft_refuses_an_answer_with_an_image_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = examples(tmp_path, ["it is <|image_pad|>", "it is 1"])
    assert main(["sft", *words]) == 2
    assert "image" in capsys.readouterr().err


def test_a_reference_with_another_frozen_tower_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write(tmp_path, "qwen2_5_vl", steps=1)
    other = families.write("qwen2_5_vl", tmp_path / "other", seed=1)
    words = ["--algorithm.kl_coef", "0.1", "--algorithm.reference_path", str(other)]
    assert main(["train", str(recipe), *words]) == 2
    assert "has another vision tower" in capsys.readouterr().err
