"""README.md beside the final and the best model."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
from huggingface_hub import ModelCard

from rollover import cli


def test_final_and_best_model_have_a_card(tmp_path: Path) -> None:
    recipe = runs.write(
        tmp_path,
        steps=2,
        run={"name": "a | b\n<i>"},
        algorithm={"preset": "dapo"},
        tasks={"eval_fraction": 0.1},
        eval={"num_tasks": 4, "samples_per_task": 1},
        checkpoint={"save_best_model": True},
    )
    assert cli.main(["train", str(recipe)]) == 0
    held_out = runs.json_lines(tmp_path / "run" / "eval.jsonl")
    for name in ("model", *(["best_model"] if (tmp_path / "run" / "best_model").exists() else [])):
        card = ModelCard.load(tmp_path / "run" / name / "README.md")
        assert card.data.tags == ["rollover", "reinforcement-learning", "dapo", "grpo"]
        assert card.data.library_name == "transformers" and card.data.base_model is None, "its folder is not published"
        assert "# a \\| b &lt;i>" in card.text and str(tmp_path) not in card.text
        assert "| Base model | model |" in card.text and "| Learning rate | 0.001 |" in card.text
    final = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| Steps | 2 |" in final and f"| Held-out mean reward | {held_out[-1]['mean']:.3f} |" in final


def test_a_card_that_cannot_be_written_is_told_and_resume_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, card = runs.write(tmp_path, steps=1), tmp_path / "run" / "model" / "README.md"
    card.parent.mkdir(parents=True)
    card.symlink_to("/dev/full")
    assert cli.main(["train", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert f"{card} cannot be written: No space left on device. The model beside it is whole" in error
    assert "Traceback" not in error
    card.unlink()
    assert cli.main(["train", str(recipe), "--resume"]) == 0
    assert card.read_text().startswith("---") and (card.parent / "model.safetensors").exists()
