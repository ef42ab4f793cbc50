"""workflow.resume of environments in runs of the real program: states that cannot be kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
from test_journal_run import check_whole
from test_workflow_run import recipe as of_games

from rollover.cli import main

CLASSES = """
import asyncio, os, signal
from pathlib import Path
from rollover.envs.tools import Call

HERE = Path(__file__).parent

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
        self.seen.append(number)
        return f"{len(self.seen)}"

    async def later(self, number: int) -> str:
        '''Sees it a little later.

        Args:
            number: which
        '''
        await asyncio.sleep(0.001)
        self.seen.append(number)
        return f"{len(self.seen)}!"

    def get_reward(self):
        return sum(self.seen) / 100 + len(self.seen)

class Snapshot(Stateless):
    def snapshot(self):
        return {"seen": self.seen}

    async def restore(self, state):
        self.seen = state["seen"]

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
