"""workflow.environment in runs of the real program: hostile classes, by Python, and evaluated."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import runs
from runs import check_whole

import rollover
import tiny
from rollover.cli import main

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
GAMES = """
import sys, threading
from rollover import Observation

class Game:
    turns = 3

    def reset(self, answer):
        self.number, self.said = int(answer), []
        return f" (up to {self.number})"

    def step(self, message):
        self.said.append(message)
        return Observation("more", reward=sum(c.isdigit() for c in message) / 20, done=len(self.said) == self.turns)

class Hostile(Game):  # by the number of the task
    def step(self, message):
        if self.number % 5 == 1:
            sys.exit(3)
        if self.number % 5 == 2:
            threading.Event().wait(60)
        return super().step(message)
"""


def recipe(folder: Path, name: str, *, steps: int = 2, template: str = TEMPLATE, **tables) -> Path:
    """The tiny model ends a turn after eight tokens in the mean: every twelfth token does."""
    folder.mkdir(exist_ok=True)
    tiny.save(folder / "model", max_position_embeddings=1024)
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "model")
    (folder / "games.py").write_text(GAMES)
    workflow = {"environment": f"{folder}/games.py:{name}", **tables.pop("workflow", {})}
    rollout = {"stop_token_ids": list(range(2, 14)), "max_new_tokens": 100, **tables.pop("rollout", {})}
    return runs.write(folder, steps=steps, workflow=workflow, rollout=rollout, **tables)


def test_a_step_that_exits_or_hangs_each_time_costs_the_reward(tmp_path: Path) -> None:
    file = recipe(tmp_path, "Hostile", workflow={"tool_timeout_s": 1.0})
    assert main(["train", str(file)]) == 0
    (*_, row) = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert row["dropped/too_few_rewards/groups"] >= 1 and row["dropped/failed/groups"] == 0 and row["episodes/done"] > 0
    assert row["episodes/failed"] >= 3 and row["episodes/retried"] >= 3
    check_whole(tmp_path / "run", 2)


def test_evaluations_have_the_same_prompts_and_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(recipe(tmp_path, "Game", steps=1)), "--eval.num_tasks=4"]
    assert main(["train", *words]) == 0
    _, after = runs.json_lines(tmp_path / "run" / "eval.jsonl")
    capsys.readouterr()
    assert main(["eval", *words, "--model", str(tmp_path / "run" / "model"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] == pytest.approx(after["mean"])


def test_a_class_of_a_program(tmp_path: Path) -> None:
    names: dict = {"__file__": str(tmp_path / "games.py")}
    exec(GAMES, names)
    file = recipe(tmp_path, "Game")
    run = rollover.train(config=file, workflow={"environment": names["Game"]})
    assert run.config["workflow"]["environment"].startswith("<python>:Game-")
    assert run.metrics[-1]["episodes/done"] > 0
    check_whole(tmp_path / "run", 2)
