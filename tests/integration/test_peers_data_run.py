"""Data as verl's and TRL's users have it, through the configuration and a whole run: what the model reads, what the
reward is given, what is held out; stopped in the middle of an epoch; and what is missing is named before a step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import runs
from test_replay import SYNC, same_weights

import tiny
from rollover import cli

VERL_REWARD = '''
import json

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's; what it was given is written down."""
    with open({log!r}, "a") as file:
        file.write(json.dumps([data_source, ground_truth, extra_info]) + "\\n")
    return float(any(c in solution_str for c in ground_truth))
'''
TRL_REWARD = '''
import json

def reward(prompts, completions, solution, level, **kwargs):
    """TRL's; what it was given is written down."""
    with open({log!r}, "a") as file:
        for row in zip(prompts, completions, solution, level):
            file.write(json.dumps([*row, sorted(kwargs)]) + "\\n")
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(c.isdigit() for c in text) / 12 for text in texts]
'''


def verl_row(i: int, **changes: Any) -> dict[str, Any]:
    """As verl's examples/data_preprocess write them."""
    row = {
        "data_source": "mine/count",
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"count to {i}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i, "split": "train", "answer": f"it is {i}"},
    }
    return {k: v for k, v in (row | changes).items() if v is not ...}


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


def recipe(folder: Path, sources: list[dict[str, Any]], steps: int = 6, **tables: Any) -> Path:
    """The usual tiny recipe with these sources; no reward for all of them."""
    small = {"max_new_tokens": 12} | SYNC
    path = runs.write(folder, steps=steps, rollout=small, rewards={"function": None}, **tables)
    lines = path.read_text().partition("[[tasks.sources]]")[0]
    for source in sources:
        lines += "[[tasks.sources]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in source.items())
    path.write_text(lines)
    return path


def train(*words: object) -> None:
    assert cli.main(["train", *map(str, words)]) == 0


def logged(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def peers(folder: Path) -> list[dict[str, Any]]:
    """verl's train and test files, and a conversational data set of TRL's that is streamed."""
    folder.mkdir()
    (folder / "verl_reward.py").write_text(VERL_REWARD.format(log=str(folder / "verl.log")))
    (folder / "trl_reward.py").write_text(TRL_REWARD.format(log=str(folder / "trl.log")))
    train_file = parquet(folder / "train.parquet", [verl_row(i) for i in range(10)])
    test_file = parquet(folder / "test.parquet", [verl_row(i) for i in range(8, 12)])
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    rows = [
        {"prompt": [*turns, {"role": "user", "content": f"say {i}"}], "solution": str(i), "level": i % 3}
        for i in range(9)
    ]
    (folder / "trl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "trl_test.jsonl").write_text(json.dumps(rows[8]) + "\n")
    verl = {"kind": "dataset", "path": str(train_file), "eval_path": str(test_file)}
    trl = {"kind": "dataset", "path": str(folder / "trl.jsonl"), "eval_path": str(folder / "trl_test.jsonl")}
    return [
        verl | {"reward": f"{folder}/verl_reward.py:compute_score", "weight": 2.0},
        trl | {"reward": f"{folder}/trl_reward.py:reward", "streaming": True},
    ]


def test_verl_and_trl_data_are_trained_as_they_are_and_resumed_in_an_epoch(tmp_path: Path) -> None:
    whole = recipe(tmp_path / "whole", peers(tmp_path / "one"), steps=10)
    train(whole)
    records = runs.records(tmp_path / "whole" / "run")
    prompts = {str(tiny.tokenizer().decode(record["prompt_ids"])) for record in records if record["prompt_ids"]}
    assert any("be brief" in text and "count to 3" in text for text in prompts), prompts
    assert any("hello" in text and "yes" in text and "say 3" in text for text in prompts), prompts
    held_out = ("count to 8", "count to 9", "say 8")
    assert not [text for text in prompts if any(words in text for words in held_out)], "they are in the held-out files"
    assert max(record["attempt"] for record in records) >= 1, "more than an epoch"
    for data_source, truth, extra in logged(tmp_path / "one" / "verl.log"):
        assert data_source == "mine/count" and verl_row(int(truth))["extra_info"].items() <= extra.items()
    for prompt, completion, solution, level, others in logged(tmp_path / "one" / "trl.log"):
        assert [m["role"] for m in prompt] == ["user", "assistant", "user"] and prompt[-1][
            "content"
        ] == f"say {solution}"
        assert completion[0]["role"] == "assistant" and level == int(solution) % 3 and "completion_ids" in others

    stopped = recipe(tmp_path / "stopped", peers(tmp_path / "two"), steps=10)
    train(stopped, "--train.num_steps", 3)  # in the first epoch of one, and in the second of the other
    train(stopped, "--resume")
    again = runs.records(tmp_path / "stopped" / "run")
    assert [(r["task_id"], r["attempt"], r["token_ids"]) for r in again] == [
        (r["task_id"], r["attempt"], r["token_ids"]) for r in records
    ]
    assert same_weights(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": ...}, "no prompt column .*its columns are data_source, ability.*set tasks.sources.prompt_column"),
        ({"reward_model": ...}, "no answer column .*needs; its columns are .*set tasks.sources.answer_column"),
        (
            {"reward_model": {"style": "rule"}, "data_source": "openai/gsm8k"},
            r"needs an answer \(reward_model.ground_truth.*set tasks.sources.answer_c",
        ),
        ({"images": [{"path": "a.png"}]}, "column 'images': there is no file .*a.png"),
        ({"data_source": "hiyouga/geometry3k"}, "hiyouga/geometry3k"),
    ],
)
def test_what_is_missing_is_named_before_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    path = parquet(tmp_path / "train.parquet", [verl_row(i, **changes) for i in range(10)])
    file = recipe(tmp_path / "run", [{"kind": "dataset", "path": str(path)}])
    assert cli.main(["train", str(file)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("rollover: error:")
    assert re.search(said, error), error
