"""Evaluations, samples, the best model and its card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import endings
import pytest
import runs
import torch
from huggingface_hub import ModelCard
from test_workflow_run import of_environment, of_function
from transformers import AutoModelForCausalLM

import tiny
from rollover import cli
from rollover.checkpoint.store import CheckpointStore
from rollover.cli import main
from rollover.run import evaluate
from rollover.run.evaluate import EvalAnswers
from rollover.track.answers import Answer

# `rollover eval`: the table by file and data_source, every answer in a file, the worst on the console


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = runs.write(tmp_path, rollout={"max_new_tokens": 12}, eval={"num_tasks": 6, "samples_per_task": 2})
    rows = [{"prompt": f"say {i}", "answer": f"#### {i}", "data_source": "ab"[i % 2]} for i in range(6)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_answers_and_the_worst_of_them(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(recipe), "--tasks.sources.0.eval_path", "test.jsonl", "--rewards.function", "reward.py:reward"]
    assert main([*words, "--answers", "out.jsonl", "--worst", "3"]) == 0
    said, told = capsys.readouterr()
    line = (
        "tasks: tasks has 400 rows: 400 are trained, 0 left out, as test.jsonl has their problems; 0 repeat another's"
    )
    assert line in told and "6 held-out tasks (tasks 6), of which 0 have the words and the answer" in told
    rows = runs.json_lines(tmp_path / "out.jsonl")
    assert len(rows) == 12 and {(r["source"], r["data_source"]) for r in rows} == {("test", "a"), ("test", "b")}
    for row in rows:
        number = row["prompt"].removeprefix("user: say ")
        assert row["expected"] == number and row["task_id"] == f"tasks/eval/{number}"
        assert row["score"] == pytest.approx(sum(c.isdigit() for c in row["answer"]) / 48) and row["error"] is None
        assert row["stop_reason"] in ("eos", "length") and 0 < row["num_tokens"] <= 12
    for label in ("test", "data_source a", "data_source b", "all"):
        assert f" {label} " in said
    lowest = sorted(rows, key=lambda r: r["score"])[:3]
    for row in lowest:
        assert f"{row['task_id']} (test): score {row['score']:.2f}, {row['stop_reason']}" in said
    assert said.count("\n  -> ") == 3
    assert main([*words, "--json", "--worst", "2", "--against", "out.jsonl"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["worst"] == lowest[:2] and set(result["data_sources"]) == {"a", "b"}
    [against] = result["against"]
    assert (against["tasks"], against["difference"], against["p_value"], against["unpaired"]) == (6, 0, 1, 0)


def test_several_settings_against_what_was_recorded_of_another_model(recipe: Path, tmp_path: Path, capsys) -> None:
    recipe.write_text(
        recipe.read_text()
        + '[[eval.settings]]\nname = "greedy"\ntemperature = 0.0\nmax_new_tokens = 5\n'
        + '[[eval.settings]]\nname = "many"\nsamples_per_task = 4\n'
    )
    words = ["eval", str(recipe), "--eval.majority", "true", "--eval.num_tasks", "4"]
    assert main([*words, "--answers", "a.jsonl", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "maj@4" not in result and result["settings"]["greedy"]["tokens"] <= 5
    assert {"maj@4", "maj@4_ci", "pass@4", "sources", "truncated"} <= result["settings"]["many"].keys()
    rows = runs.json_lines(tmp_path / "a.jsonl")
    assert [sum(r.get("setting", "") == name for r in rows) for name in ("", "greedy", "many")] == [8, 4, 16]
    assert all(r["num_tokens"] <= 5 for r in rows if r.get("setting") == "greedy")
    for row in rows:
        digits = re.findall(r"\d+", row["answer"])
        assert ("vote" in row) == bool(digits), row
    tiny.save(tmp_path / "other", seed=1)
    assert main([*words, "--model", "other", "--against", "a.jsonl", "--answers", "b.md"]) == 0
    said = capsys.readouterr().out
    assert " greedy " in said and " many " in said
    for start in ("against a.jsonl: 4 tasks: mean reward ", "setting greedy: 4 tasks: ", "setting many: 4 tasks: "):
        assert start in said
    assert (tmp_path / "b.md").read_text().count("\n\nanswer (") == 28
    assert main([*words, "--against", "nowhere.jsonl", "--model.path", "/no/such/model"]) == 2
    assert "--against nowhere.jsonl: it cannot be read" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_an_error_before_the_model_is_loaded(recipe: Path, capsys) -> None:
    assert main(["eval", str(recipe), "--answers", "nowhere/out.jsonl", "--model.path", "/no/such/model"]) == 2
    assert "--answers nowhere/out.jsonl: there is no folder nowhere" in capsys.readouterr().err


def test_answers_are_kept_where_every_reward_failed(recipe: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "reward.py").write_text("def reward(completions, **columns):\n    raise KeyError('x')\n")
    assert main(["eval", str(recipe), "--answers", "out.jsonl"]) == 2
    assert "the last error is: KeyError: 'x'" in capsys.readouterr().err
    rows = runs.json_lines(tmp_path / "out.jsonl")
    assert len(rows) == 12 and all(r["score"] is None and "reward.py:2" in r["error"] for r in rows)


def test_training_tasks_that_cannot_be_used_do_not_keep_the_others_from_being_evaluated(recipe: Path, capsys) -> None:
    assert main(["eval", str(recipe), "--tasks.eval_fraction", "0.9999", "--eval.num_tasks", "2"]) == 0
    told = capsys.readouterr().err
    assert "tasks: those for training cannot be looked at, so nothing is said of them here: tasks.eval_fraction" in told


def test_held_out_tasks_with_long_prompts_are_counted(recipe: Path, tmp_path: Path, capsys) -> None:
    rows = [{"prompt": "x" * size, "answer": "1"} for size in (1, 2, 60, 70, 80)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(recipe), "--tasks.sources.0.eval_path", "test.jsonl", "--tasks.max_prompt_tokens", "30"]
    line = "3 of 5 held-out tasks are not evaluated: their prompts exceed 30 tokens"
    assert main(["eval", *words]) == 0
    said, told = capsys.readouterr()
    assert "3 more tasks are left out" in said and line in told
    assert main(["train", *words, "--train.num_steps", "1", "--run.dir", "out"]) == 0
    said, _ = capsys.readouterr()
    assert "left out (prompts too long)" in said and said.count(line) == 1
    late = ["--eval.at_start", "false", "--train.num_steps", "1", "--run.dir", "late"]
    assert main(["train", *words, *late]) == 0
    said, _ = capsys.readouterr()
    assert said.index(line) < said.index("step 1/1") and said.count(line) == 1
    assert [(row["tasks"], row["left_out"]) for row in runs.json_lines(tmp_path / "out" / "eval.jsonl")] == [(2, 3)] * 2


# `rollover sample`: whole episodes of an environment and of a workflow, to be read; a prompt for single turns


def test_episodes_of_an_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(of_environment(tmp_path, "Game"))]
    assert main([*words, "--num", "2"]) == 0
    said = capsys.readouterr().out
    first, second = said.split("--- 2 of 2\n")
    for episode in (first, second):
        assert (
            re.search(r"^policy: score [\d.]+$", episode, re.M) and len(re.findall(r"^  turn \d ", episode, re.M)) == 3
        )
        assert re.search(r"^  prompt +u:count to \d+", episode, re.M) and re.search(r"^  answer +u:more", episode, re.M)
    assert first.partition("\n")[2] != second, "each has draws of its own"
    assert main([*words, "--prompt", "begin", "--columns", '{"answer": "77"}']) == 0
    said = capsys.readouterr().out
    assert "u:begin (up to 77)" in said and "policy: score" in said


def test_episodes_of_a_workflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(of_function(tmp_path, "talk"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if re.match(r"\w+: score", line)]
    assert [head.partition(":")[0] for head in heads] == ["solver", "judge"]
    solver = lines[lines.index(heads[0]) : lines.index(heads[1])]
    assert [line.split()[0] for line in solver[1:] if line.startswith("  ") and line[2] != " "] == [
        "prompt", "turn", "answer", "turn"
    ]  # fmt: skip


def test_what_cannot_be_sampled_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = runs.write(tmp_path / "plain")
    assert main(["sample", str(plain)]) == 2
    assert "is asked with --prompt TEXT" in capsys.readouterr().err
    file = of_function(tmp_path, "talk")
    file.write_text(file.read_text().partition("[[tasks.sources]]")[0])
    assert main(["sample", str(file)]) == 2
    assert "there is no task: set [[tasks.sources]]" in capsys.readouterr().err


# The checkpoint and the model of the best evaluation, early stop, and both over a kill and --resume


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


def test_the_best_checkpoint_stays_beside_the_newest_and_its_model_is_written(tmp_path, monkeypatch, capsys) -> None:
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


def test_a_run_that_was_killed_knows_the_best_and_ends_where_the_other_does(tmp_path, monkeypatch, capsys) -> None:
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


def test_a_run_that_ended_early_says_so_and_goes_on_with_more_patience(tmp_path: Path, monkeypatch, capsys) -> None:
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


def test_first_evaluation_is_the_best_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    found(monkeypatch, 0.9, 0.9, 0.3, 0.9, 0.2)
    options = {"eval": {"at_start": False, "every_steps": 2, "metric": "sources/task/mean"}}
    recipe = write(tmp_path, 4, checkpoint={"keep_best": True}, **options)
    code, said = endings.train(capsys, recipe)
    assert code == 0 and means(tmp_path) == [0.3, 0.2] and checkpoints(tmp_path) == [4]
    assert said.count("Until then no evaluation is the best one") == 1, "known too late to end the run"
    assert "0.200" in said and "-0.100" not in said, (
        "there is nothing before the training that it could be compared with"
    )


def test_a_metric_that_is_not_there_ends_the_run_before_its_first_step(tmp_path: Path, monkeypatch, capsys) -> None:
    found(monkeypatch, 0.5, 0.5)
    recipe = write(tmp_path, 1, eval={"metric": "sources/task/mean"}, checkpoint={"keep_best": True})
    code, said = endings.train(capsys, recipe)
    assert code == 2 and "eval.metric = 'sources/task/mean'" in said and 'Did you mean "sources/tasks/mean"' in said
    assert not (tmp_path / "run" / "metrics.jsonl").read_bytes()


# README.md beside the final and the best model


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


def test_a_card_that_cannot_be_written_is_told_and_resume_goes_on(tmp_path: Path, capsys) -> None:
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
