"""The checkpoint and the model of the best evaluation, early stop, and both over a kill and --resume.

What an evaluation finds is said by the tests; everything else is the real run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import endings
import pytest
import runs
import torch
from transformers import AutoModelForCausalLM

from rollover.checkpoint.store import CheckpointStore
from rollover.run import evaluate
from rollover.run.evaluate import EvalAnswers
from rollover.track.answers import Answer

EVAL = {"num_tasks": 2, "every_steps": 1, "seed": 3}


def found(monkeypatch: pytest.MonkeyPatch, *means: float) -> None:
    """From now on the evaluation after step i finds means[i]."""

    async def answer_tasks(
        tasks: Any, engine: Any, environment: Any, tokenizer: Any, config: Any, *_: Any
    ) -> EvalAnswers:
        score = means[engine.oldest_version]
        return EvalAnswers(
            [
                Answer(t.task_id, 0, "tasks", None, None, "eos", 3, score, None, t.content, "12")
                for t in tasks.tasks
            ]
        )  # fmt: skip

    monkeypatch.setattr(evaluate, "answer_tasks", answer_tasks)


def checkpoints(folder: Path) -> list[int]:
    names = CheckpointStore(str(folder / "run" / "checkpoints"), keep=1).list()
    return [int(name.removeprefix("step-")) for name in names]


def means(folder: Path) -> list[float]:
    return [row["mean"] for row in runs.json_lines(folder / "run" / "eval.jsonl")]


def write(folder: Path, steps: int, **tables: Any) -> Path:
    checkpoint = {"every_steps": 2, "keep": 1, **tables.pop("checkpoint", {})}
    return runs.write(folder, steps=steps, eval=EVAL | tables.pop("eval", {}), checkpoint=checkpoint, **tables)


def test_the_best_checkpoint_stays_beside_the_newest_and_its_model_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, 0.9, 0.2, 0.2, 0.95, 0.1, 0.1)
    recipe = write(tmp_path, 5, checkpoint={"keep_best": True, "save_best_model": True})
    code, said = endings.train(capsys, recipe)
    assert code == 0 and "best model" in said
    assert checkpoints(tmp_path) == [3, 5], "step 3 is the best, though it is no multiple of every_steps"
    assert json.loads((tmp_path / "run" / "best_model" / "evaluation.json").read_text()) == {"step": 3}
    best, last = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / name).state_dict() for name in ("best_model", "model")
    )
    assert any(not torch.equal(best[name], last[name]) for name in best)
    saved = torch_weights(tmp_path / "run" / "checkpoints" / "step-000003")
    assert all(torch.equal(best[name], saved[name]) for name in saved if name in best), "of the same step"


def torch_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint, by their names in the model."""
    from safetensors.torch import load_file

    files = [load_file(file) for file in checkpoint.rglob("trainer-*.safetensors")]
    return {name.partition("/")[2]: t for of in files for name, t in of.items() if name.startswith("model/")}


def test_without_it_the_best_goes_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, 0.1, 0.9, 0.2, 0.2, 0.2)
    assert endings.train(capsys, write(tmp_path, 4))[0] == 0
    assert checkpoints(tmp_path) == [4] and not (tmp_path / "run" / "best_model").exists()


def test_a_run_that_was_killed_knows_the_best_and_ends_where_the_other_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, 0.1, 0.5, 0.3, 0.4, 0.2, 0.9, 0.9)
    options = {
        "eval": {"patience": 3},
        "checkpoint": {"keep_best": True, "save_best_model": True},
        "rollout": {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 0},  # in the order of a schedule
    }
    code, said = endings.train(capsys, write(tmp_path / "plain", 6, **options))
    why = "3 evaluations in a row were no better than that after step 1 (mean 0.5; eval.patience = 3)"
    assert code == 0 and f"training ends here: {why}" in said and f"It ended early: {why}" in said
    assert checkpoints(tmp_path / "plain") == [1, 4]
    for name, before_row in (("between steps", False), ("before a row", True)):
        killed = write(tmp_path / name, 6, **options)
        endings.train_until(capsys, 3, killed, before_row=before_row)
        (tmp_path / name / "run" / "evaluations" / "step-000009.jsonl").write_text("{}\n")  # of a lost future
        code, said = endings.train(capsys, killed, "--resume")
        assert code == 0 and f"It ended early: {why}" in said, name
        assert checkpoints(tmp_path / name) == [1, 4] and means(tmp_path / name) == [0.1, 0.5, 0.3, 0.4, 0.2], name
        for of in ("model", "best_model"):
            models = [
                AutoModelForCausalLM.from_pretrained(tmp_path / run / "run" / of).state_dict()
                for run in ("plain", name)
            ]
            assert all(torch.equal(models[0][key], models[1][key]) for key in models[0]), (name, of)
        files = sorted(p.name for p in (tmp_path / name / "run" / "evaluations").iterdir())
        assert files == [f"step-{step:06d}.jsonl" for step in range(5)], name


def test_a_run_that_ended_early_says_so_and_goes_on_with_more_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, 0.5, 0.1, 0.2, 0.3, 0.8)
    recipe = write(tmp_path, 4, eval={"patience": 2}, checkpoint={"keep_best": True})
    assert endings.train(capsys, recipe)[0] == 0 and means(tmp_path) == [0.5, 0.1, 0.2]
    assert checkpoints(tmp_path) == [2], "what training began with is the best, and no checkpoint"
    assert not (tmp_path / "run" / "best_model").exists()
    code, said = endings.train(capsys, recipe, "--resume")
    assert "2 steps are trained, and 2 evaluations in a row were no better" in said, said
    assert means(tmp_path) == [0.5, 0.1, 0.2]
    code, said = endings.train(capsys, recipe, "--resume", "--eval.patience", "4")
    assert code == 0 and means(tmp_path) == [0.5, 0.1, 0.2, 0.3, 0.8] and checkpoints(tmp_path) == [4]


def test_without_an_evaluation_at_the_start_the_first_one_after_it_is_the_best_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, 0.9, 0.9, 0.3, 0.9, 0.2)
    options = {"eval": {"at_start": False, "every_steps": 2, "metric": "sources/task/mean"}}
    recipe = write(tmp_path, 4, checkpoint={"keep_best": True}, **options)
    code, said = endings.train(capsys, recipe)
    assert code == 0 and means(tmp_path) == [0.3, 0.2] and checkpoints(tmp_path) == [4]
    assert said.count("Until then no evaluation is the best one") == 1, "known too late to end the run"
    assert "0.200" in said and "-0.100" not in said, (
        "there is nothing before the training that it could be compared with"
    )


def test_a_metric_that_is_not_there_ends_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, 0.5, 0.5)
    recipe = write(tmp_path, 1, eval={"metric": "sources/task/mean"}, checkpoint={"keep_best": True})
    code, said = endings.train(capsys, recipe)
    assert code == 2 and "eval.metric = 'sources/task/mean'" in said and 'Did you mean "sources/tasks/mean"' in said
    assert not (tmp_path / "run" / "metrics.jsonl").read_bytes()
