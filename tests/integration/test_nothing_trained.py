"""A run that trained nothing in its whole life ends with exit code 2 and the reason; one that is finished with 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs

from rollover.cli import main
from rollover.config import Config
from rollover.track.health import reason_nothing_trained

ALIKE = "def reward(prompts, completions, **columns): return [0.25 for _ in completions]\n"


def test_rewards_that_are_all_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, steps=2)
    (tmp_path / "reward.py").write_text(ALIKE)
    assert main(["train", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert "nothing was trained: every gradient was 0, and in 100% of the groups all rewards were equal" in said
    assert (tmp_path / "run" / "model" / "model.safetensors").exists(), "its outputs are whole all the same"
    assert main(["train", str(recipe), "--resume", f"--run.dir={tmp_path / 'run'}"]) == 2, "nothing is trained still"


def test_a_run_that_is_not_to_train(tmp_path: Path) -> None:
    assert main(["train", str(runs.write(tmp_path, steps=0))]) == 0


TRAINED = {"grad_norm": 0.3, "train/updates": 1.0}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "no step was made"),
        ([{"grad_norm": 0.0, "train/updates": 1.0}], "every gradient was 0. Look"),
        ([{"grad_norm": None, "train/updates": 0.0, "train/skipped_steps": 1.0}], "every update was skipped"),
        ([{"grad_norm": 0.0, "train/updates": 1.0}, TRAINED], ""),
        ([{"train/updates": 1.0}], ""),
    ],
)
def test_the_reason(rows: list[dict[str, Any]], reason: str) -> None:
    found = reason_nothing_trained(Config(), rows)
    assert found.startswith(reason) and bool(found) == bool(reason)
