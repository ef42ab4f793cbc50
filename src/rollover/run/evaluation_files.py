"""What a run writes of its evaluations beside their rows: every answer, and the model of the best one.

Owns the two folders, and that a model which is half written is none. Never decides what is written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rollover.files import atomic_write_text, read_object
from rollover.track.records import step_of

_BEST = "evaluation.json"  # in the model's folder, written last


class EvaluationFiles:
    """`evaluations/` and `best_model/` in the directory of a run."""

    def __init__(self, run: Path) -> None:
        self.answers, self.best_model = run / "evaluations", run / "best_model"

    def answers_of(self, step: int) -> Path:
        """The file of all answers of the evaluation after this step; its folder is there."""
        self.answers.mkdir(exist_ok=True)
        return self.answers / f"step-{step:06d}.jsonl"

    @property
    def best_model_step(self) -> int | None:
        """After which step the best model was written; None where there is none, or half of one."""
        path = self.best_model / _BEST
        return read_object(path, step=int)["step"] if path.exists() else None

    def on_best_model(self, step: int) -> None:
        """It is whole, and of this step."""
        atomic_write_text(self.best_model / _BEST, json.dumps({"step": step}) + "\n")

    def forget_best_model(self) -> None:
        """Delete it; from the first moment on it is none."""
        (self.best_model / _BEST).unlink(missing_ok=True)
        shutil.rmtree(self.best_model, ignore_errors=True)

    def forget_after(self, step: int) -> None:
        """Delete what is of later steps: they did not happen."""
        for file in self.answers.glob("step-*.jsonl"):
            if (step_of(file.name) or 0) > step:
                file.unlink()
        if (self.best_model_step or 0) > step:
            self.forget_best_model()
