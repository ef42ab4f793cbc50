"""workflow.environment in runs of the real program: killed in the middle of episodes, with hostile classes, by Python,
evaluated; and what exits 2."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import runs
from test_journal_run import check_whole

import rollover
import tiny
from rollover.cli import main

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
GAMES = """
import os, signal, sys, threading
from pathlib import Path
from rollover import Observation

HERE = Path(__file__).parent

class Game:
    turns = 3

    def reset(self, answer):
        self.number, self.said = int(answer), []
        return f" (up to {self.number})"

    def step(self, message):
        self.said.append(message)
        return Observation("more", reward=sum(c.isdigit() for c in message) / 20, done=len(self.said) == self.turns)

class Killed(Game):
    seconds = 0

    def step(self, message):
        with (HERE / "asked").open("a") as file:
            print(os.getpid(), self.number, len(self.said), file=file)
        Killed.seconds += len(self.said) == 1
        if Killed.seconds == 6 and (HERE / "kill").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(message)

class Hostile(Game):  # by the number of the task
    def step(self, message):
        if self.number % 5 == 1:
            sys.exit(3)
        if self.number % 5 == 2:
            threading.Event().wait(60)
        return super().step(message)

class HostileReward(Game):
    def get_reward(self):
        num = len("".join(self.said))
        if num % 5 == 1:
            raise KeyError("no judge")
        return "much" if num % 5 == 2 else num / 20

class Untyped(Game):
    step = None

    def tool(self, text):
        '''Says.'''

class Neither(Game):
    step = None

class Both(Game):
    def tool(self, text: str) -> str:
        '''Says.

        Args:
            text: what
        '''

class Needs(Game):
    def reset(self, question_id):
        pass

class Alike(Game):
    def tool(self) -> str:
        '''Says.'''

    step = None
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


def test_episodes_that_were_killed_go_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    # Weights that do not change, so that tokens do not depend on the step in which they are sampled.
    still = {"train": {"learning_rate": 0.0}, "checkpoint": {"every_steps": 0, "journal_s": 0.05}}
    killed, whole = (recipe(tmp_path / name, "Killed", **still) for name in ("killed", "whole"))
    (killed.parent / "kill").touch()
    assert runs.rollover("train", killed).returncode == -9
    (killed.parent / "kill").unlink()
    assert main(["train", str(killed), "--resume"]) == 0
    assert main(["train", str(whole)]) == 0
    check_whole(killed.parent / "run", 2)
    asked = [line.split() for line in (killed.parent / "asked").read_text().splitlines()]
    first = {(number, turn) for pid, number, turn in asked if pid == asked[0][0]}
    assert {turn for _, turn in first} >= {"0", "1"}, "it was killed in the middle of episodes"
    ours, theirs = ({r["rollout_id"]: r for r in runs.records(f.parent / "run")} for f in (killed, whole))
    assert len(ours.keys() & theirs.keys()) >= 12
    for rollout_id in ours.keys() & theirs.keys():
        for key in ("token_ids", "score", "stop_reason"):
            assert ours[rollout_id][key] == theirs[rollout_id][key], rollout_id
    assert any(r["stop_reason"] == "env_done" for r in ours.values())


def test_a_step_that_exits_or_hangs_each_time_costs_the_reward(tmp_path: Path) -> None:
    file = recipe(tmp_path, "Hostile", workflow={"tool_timeout_s": 1.0})
    assert main(["train", str(file)]) == 0
    (*_, row) = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert row["dropped/too_few_rewards/groups"] >= 1 and row["dropped/failed/groups"] == 0 and row["episodes/done"] > 0
    assert row["episodes/failed"] >= 3 and row["episodes/retried"] >= 3
    check_whole(tmp_path / "run", 2)


def test_a_reward_that_fails_is_missing(tmp_path: Path) -> None:
    assert main(["train", str(recipe(tmp_path, "HostileReward", rollout={"group_size": 8}))]) == 0
    errors = {r["error"].partition(" (")[0] for r in runs.records(tmp_path / "run") if r["error"]}
    start = f"workflow.environment = '{tmp_path}/games.py:HostileReward'"
    assert errors & {
        f"{start} failed at get_reward: KeyError: 'no judge'",
        f"{start}: its reward: the function returned str 'much', expected a number",
    }
    assert all(error.startswith(start) for error in errors)
    (*_, row) = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert row["step"] == 2 and row["reward/mean"] > 0


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


@pytest.mark.parametrize(
    ("name", "template", "why"),
    [
        ("Untyped", TEMPLATE, "the tool tool has no complete types"),
        ("Neither", TEMPLATE, "has neither tools nor step"),
        ("Both", TEMPLATE, "rename step, or let the names of the others begin with an underscore"),
        ("Needs", TEMPLATE, "takes question_id in reset, but the data of tasks has no such column: it has prompt"),
        ("Alike", TEMPLATE.replace("{{ m", "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m"),
         "set a chat template that takes the role tool"),
    ],
)  # fmt: skip
def test_what_cannot_be_played_exits_2_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, template: str, why: str
) -> None:
    assert main(["train", str(recipe(tmp_path, name, template=template))]) == 2
    error = capsys.readouterr().err
    assert why in error and "Traceback" not in error, error
    assert not runs.json_lines(tmp_path / "run" / "metrics.jsonl")
