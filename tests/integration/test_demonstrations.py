"""docs/own-functions.md, "Tokens that the policy did not sample": a producer's demonstrations are fine-tuned on."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import runs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PAGE = runs.REPOSITORY / "docs" / "own-functions.md"
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
    block = re.search(r"```python\n(?:(?!```).)*class Demonstrations:.*?```", PAGE.read_text(), re.DOTALL)
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
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    before = likelihood(tmp_path / "model")
    assert math.isclose(rows[0]["loss"], before, rel_tol=1e-5), "the loss is the negative log-likelihood"
    assert likelihood(tmp_path / "run" / "model") < before / 2
    assert all(row["tokens/step_trained"] == rows[0]["tokens/step_trained"] for row in rows)
