"""An environment of the user's own that breaks in a run: words that name it, nothing wrong trained, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
from test_journal_run import check_whole

from rollover.cli import main

ENVIRONMENTS = """
import asyncio, sys
from dataclasses import replace
from rollover.envs.protocol import written
from rollover.types import Reward

class Quiet:
    def __init__(self, setup):
        self.ours, self.scores_singly = setup.score, setup.scores_singly

    async def next(self, rollout):
        return None

    async def score(self, rollouts):
        return await self.ours(rollouts)

def scoring(score):
    class Scoring(Quiet):
        async def score(self, rollouts):
            return [score(rollout) for rollout in rollouts]
    return Scoring

class Exits(Quiet):
    async def next(self, rollout):
        if rollout.group_id < 3:
            sys.exit(7)

class Cancelled(Quiet):
    async def next(self, rollout):
        if rollout.group_id < 3:
            raise asyncio.CancelledError

class Elsewhere(Quiet):
    async def next(self, rollout):
        return replace(written(rollout, [7]), start=0) if len(rollout.segments) == 1 else None

class Singly(Quiet):
    def __init__(self, setup):
        super().__init__(setup)
        self.scores_singly = None

class Few(Quiet):
    async def score(self, rollouts):
        return []

class Fails(Quiet):
    async def score(self, rollouts):
        if rollouts[0].group_id == 1:
            raise KeyError("no judge")
        return await self.ours(rollouts)

NotANumber = scoring(lambda rollout: Reward(float("nan")))
Bare = scoring(lambda rollout: 1.0)
Extras = scoring(lambda rollout: Reward(1.0, {"a": "b"}))
Name = scoring(lambda rollout: Reward(1.0, {"a\\nb": 1.0}))
"""


def recipe(folder: Path, name: str, steps: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(ENVIRONMENTS)
    environment = f"{folder}/mine.py:{name}"
    return runs.write(folder, steps=steps, rollout={"environment": environment})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Few", "there are 0 for 3 rollouts"),
        ("NotANumber", "nan is no finite score"),
        ("Bare", "no list of Reward"),
        ("Extras", "'b' for 'a'"),
        ("Name", "1.0 for 'a\\nb'"),
        ("Elsewhere", "it begins with token 0, and token"),
        ("Singly", "failed at scores_singly: TypeError"),
    ],
)
def test_a_wrong_answer_is_the_users_error_and_the_run_goes_on_with_a_right_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    file = recipe(tmp_path, name)
    assert main(["train", str(file)]) == 2
    error = capsys.readouterr().err
    assert "error: rollout.environment" in error and why in error, error
    assert main(["train", str(file), "--resume", f"--rollout.environment={tmp_path}/mine.py:Quiet"]) == 0
    check_whole(tmp_path / "run", 2)


@pytest.mark.parametrize("name", ["Exits", "Cancelled"])
def test_one_that_fails_at_a_turn_costs_its_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["train", str(recipe(tmp_path, name))]) == 0
    assert "the environment failed at rollout" in capsys.readouterr().out
    assert runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]["dropped/failed/groups"] >= 1
    check_whole(tmp_path / "run", 2)


def test_where_it_fails_at_scoring_rewards_are_missing(tmp_path: Path) -> None:
    assert main(["train", str(recipe(tmp_path, "Fails"))]) == 0
    assert runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]["dropped/too_few_rewards/groups"] == 1
    errors = {r["error"] for r in runs.records(tmp_path / "run") if r["outcome"] == "dropped:too_few_rewards"}
    assert len(errors) == 1 and errors.pop().startswith("rollout.environment failed: KeyError: 'no judge' (")
    check_whole(tmp_path / "run", 2)
