"""rollout.keep_special_tokens: <think> as a special token, in every text that a run makes of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rollover
import tiny
from rollover.recipes.toy_model import character_tokenizer

CODE = """
def of_trl(prompts, completions, **columns):
    text = completions[0] if isinstance(completions[0], str) else completions[0][-1]["content"]
    return [float(text == "<think>3</think>4")] * len(completions)

def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == "<think>3</think>4")
"""
ROWS = [{"prompt": f"{n}+1=", "answer": "4"} for n in range(8)]
FULL = '{"pattern": "<think>.+?</think>.+"}'


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of a run whose answers are all <think>3</think>4<|end|><eos>; <|end|> ends turns in the chat template."""
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|end|>' }}{% endfor %}"
    tokenizer = character_tokenizer(template + "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|end|>"]})
    ids = tokenizer.encode("<think>3</think>4<|end|>", add_special_tokens=False)
    tokenizer.save_pretrained(tmp_path / "model")
    tiny.model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return {
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "tasks": ROWS, "threads": 1, "groups_per_step": 2, "group_size": 2, "max_new_tokens": 16, "num_steps": 1,
        "eval": {"num_tasks": 2, "at_start": True},
        "config": {
            "rollout.logits.forced_token_ids": [*ids, 1], "tasks.eval_fraction": 0.3, "track.live": "plain",
            "run.dir": str(tmp_path / "out"), "tasks.answer_rule": "full_text",
        },
    }  # fmt: skip


@pytest.mark.parametrize(("keep", "score", "text"), [(True, 1.0, "<think>3</think>4"), (False, 0.0, "34")])
def test_rewards_and_records_have_the_special_tokens(
    settings: dict[str, Any], keep: bool, score: float, text: str
) -> None:
    functions = [{"function": name} for name in ("mine.py:of_trl", "mine.py:of_verl", f"format/{FULL}")]
    settings["config"] |= {"rewards.functions": functions, "rollout.keep_special_tokens": keep}
    run = rollover.train(**settings)
    records = list(run.records())
    assert {(record["completion"], record["score"]) for record in records} == {(text, 3 * score)}
    assert all(len(record["extras"]) == 3 and set(record["extras"].values()) == {score} for record in records)
    assert run.evaluations[0]["mean"] == 3 * score
