"""workflow.resume of environments in runs of the real program, killed at any call of the class: in a tool, between two
of them, in a snapshot, a restore, a reward. And what exits 2."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import runs
from test_journal_run import check_whole
from test_workflow_run import recipe as of_games

from rollover.cli import main

CLASSES = """
import asyncio, os, signal, threading
from pathlib import Path
from rollover.envs.tools import Call

HERE, COUNTED = Path(__file__).parent, threading.Lock()

def point():
    # SIGKILL at the call of this number, once. Tools are called in several threads.
    with COUNTED:
        point.num = getattr(point, "num", 0) + 1
        file = HERE / "kill"
        if file.exists() and point.num == int(file.read_text()):
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

class EveryTurn:
    # Each digit of a turn is a call; a turn without one ends the episode.
    def definitions(self, schemas):
        return ""

    def read(self, text):
        return [Call("digit" if int(c) % 2 else "later", {"number": int(c)}) for c in text if c.isdigit()]

class Stateless:
    def reset(self, answer):
        self.goal, self.seen = int(answer), []

    def digit(self, number: int) -> str:
        '''Sees it.

        Args:
            number: which
        '''
        point()
        self.seen.append(number)
        point()
        return f"{len(self.seen)}"

    async def later(self, number: int) -> str:
        '''Sees it a little later.

        Args:
            number: which
        '''
        point()
        await asyncio.sleep(0.001)
        self.seen.append(number)
        point()
        return f"{len(self.seen)}!"

    def get_reward(self):
        point()
        return sum(self.seen) / 100 + len(self.seen)

class Snapshot(Stateless):
    def snapshot(self):
        point()
        return {"seen": self.seen}

    async def restore(self, state):
        point()
        self.seen = state["seen"]

class Restart(Stateless):
    resume = "restart"

class Failing(Snapshot):
    waiting = set()

    def snapshot(self):
        self.turns = getattr(self, "turns", 0) + 1
        if self.goal % 3 == 0:
            raise OSError("the disk is full")
        return {1, 2} if self.goal % 3 == 1 else super().snapshot()

    async def later(self, number: int) -> str:
        '''Sees it; after the first turn waits for the kill, until one whose state is kept and one whose is not wait.

        Args:
            number: which
        '''
        if hasattr(self, "turns") and (HERE / "kill").exists():
            self.waiting.add(self.goal % 3 == 2)
            while len(self.waiting) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)  # the journal has their turns
            (HERE / "kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().later(number)

class Half(Stateless):
    def snapshot(self):
        return 1
"""
# Weights that do not change, so that tokens do not depend on the step in which they are sampled.
STILL: dict = {"train": {"learning_rate": 0.0}, "checkpoint": {"every_steps": 0, "journal_s": 0.02}}


def recipe(folder: Path, name: str, *, steps: int = 2, **tables) -> Path:
    classes = f"{folder}/classes.py"
    workflow = {"environment": f"{classes}:{name}", "tool_format": f"{classes}:EveryTurn", **tables.pop("workflow", {})}
    # The turns of the tiny model have some sixteen characters, two of which are digits.
    rollout = {
        "max_new_tokens": 120,
        "in_flight_groups": 5,
        "stop_token_ids": list(range(20, 26)),
        **tables.pop("rollout", {}),
    }
    file = of_games(folder, "Game", steps=steps, workflow=workflow, rollout=rollout, **tables)
    (folder / "classes.py").write_text(CLASSES)
    return file


SLOW = [pytest.param(kind, 12, marks=pytest.mark.slow) for kind in ("Stateless", "Snapshot", "Restart")]


@pytest.mark.parametrize(("kind", "num_kills"), [("Snapshot", 1), ("Restart", 1), *SLOW])
def test_a_run_that_was_killed_trains_what_it_would_have_trained(tmp_path: Path, kind: str, num_kills: int) -> None:
    steps, rng = 1 + 2 * num_kills, random.Random(num_kills)  # more than the kills leave room for
    killed, whole = (recipe(tmp_path / folder, kind, steps=steps, **STILL) for folder in ("killed", "whole"))
    resume: list[str] = []
    for number in range(num_kills):
        (killed.parent / "kill").write_text(str(rng.randint(5, 60) if number else 60))
        assert runs.rollover("train", killed, *resume).returncode == -9
        resume = ["--resume"]
    assert main(["train", str(killed), "--resume"]) == 0
    assert main(["train", str(whole)]) == 0
    check_whole(killed.parent / "run", steps)
    row = runs.json_lines(killed.parent / "run" / "metrics.jsonl")[-1]
    assert (row["dropped/restarted/tokens"] > 0) == (row["episodes/restarted"] > 0) == (kind == "Restart")
    assert (row["episodes/restored"] > 0) == (kind == "Snapshot")
    assert row["episodes/unsaved"] == row["episodes/failed"] == row["episodes/retried"] == 0
    ours, theirs = ({r["rollout_id"]: r for r in runs.records(f.parent / "run")} for f in (killed, whole))
    both = ours.keys() & theirs.keys()
    assert len(both) >= 6 and any(ours[i]["score"] for i in both)
    for rollout_id in both:
        for key in ("token_ids", "score", "stop_reason", "error"):
            assert ours[rollout_id][key] == theirs[rollout_id][key], rollout_id


def test_states_that_cannot_be_kept_are_said_once_and_their_episodes_begin_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recipe(tmp_path, "Failing", **STILL)
    (tmp_path / "kill").write_text("0")
    died = runs.rollover("train", file)
    assert died.returncode == -9
    assert main(["train", str(file), "--resume"]) == 0
    check_whole(tmp_path / "run", 2)
    for said in (died.stdout + died.stderr, "".join(capsys.readouterr())):
        assert said.count("goes on, and would begin again after a kill") == 1
        assert "OSError: the disk is full (" in said or "must be a JSON value, and {1, 2} (set) is none" in said
    row = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["episodes/unsaved"] > 0 and row["episodes/restarted"] > 0 and row["episodes/restored"] > 0
    assert row["dropped/restarted/tokens"] > 0 and row["episodes/failed"] == 0


@pytest.mark.parametrize(
    ("name", "words", "why"),
    [
        ("Half", [], "has no restore: after a kill an episode goes on from what snapshot() returned"),
        ("Stateless", ["--workflow.resume=snapshot"], 'set workflow.resume = "stateless" or "restart"'),
        ("Stateless", ["--workflow.resume=always"], "workflow.resume"),
    ],
)
def test_what_cannot_be_of_its_kind_exits_2_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: list[str], why: str
) -> None:
    assert main(["train", str(recipe(tmp_path, name)), *words]) == 2
    error = capsys.readouterr().err
    assert why in error and "Traceback" not in error, error
    assert not runs.json_lines(tmp_path / "run" / "metrics.jsonl")
