"""An environment of the user's own that breaks in a run: words that name it, nothing wrong trained, no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs
from runs import check_whole

import rollover
from rollover.cli import main

ENVIRONMENTS = """
import asyncio, sys
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
        if rollout.group_id < 2:
            sys.exit(7)

class Cancelled(Quiet):
    async def next(self, rollout):
        if rollout.group_id < 2:
            raise asyncio.CancelledError

class CancelsItself(Quiet):
    async def next(self, rollout):
        if rollout.group_id < 2:
            asyncio.current_task().cancel()
            await asyncio.sleep(60)

    async def score(self, rollouts):
        if rollouts[0].group_id == 2:
            asyncio.current_task().cancel()
            await asyncio.sleep(60)
        return await super().score(rollouts)

class Hangs(Quiet):  # at one rollout of three in the first groups; the others are told something
    async def next(self, rollout):
        if rollout.group_id < 3 and rollout.sibling == 0:
            await asyncio.get_running_loop().create_future()
        return written(rollout, [7, 8]) if len(rollout.segments) == 1 else None

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

class Told(Quiet):  # the policy is told two tokens; only here are there negative scores: how many turns there were
    async def next(self, rollout):
        return written(rollout, [7, 8]) if len(rollout.segments) == 1 else None

    async def score(self, rollouts):
        return [Reward(-float(sum(s.trainable for s in r.segments))) for r in rollouts]

NotANumber = scoring(lambda rollout: Reward(float("nan")))
Bare = scoring(lambda rollout: 1.0)
Extras = scoring(lambda rollout: Reward(1.0, {"a": "b"}))
Name = scoring(lambda rollout: Reward(1.0, {"a\\nb": 1.0}))
"""


def recipe(folder: Path, name: str, steps: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(ENVIRONMENTS)
    environment = f"{folder}/mine.py:{name}"
    return runs.write(folder, steps=steps, rollout={"environment": environment, "max_new_tokens": 48})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Few", "there are 0 for 3 rollouts"),
        ("NotANumber", "nan is no score: give a number within 1e30"),
        ("Bare", "no list of Reward"),
        ("Extras", "'b' for 'a'"),
        ("Name", "1.0 for 'a\\nb'"),
        ("Singly", "failed at scores_singly: TypeError"),
    ],
)
def test_a_wrong_answer_is_the_users_error_and_the_run_goes_on_once_it_is_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    file = recipe(tmp_path, name)
    assert main(["train", str(file)]) == 2
    error = capsys.readouterr().err
    assert "error: rollout.environment" in error and why in error, error
    (tmp_path / "mine.py").write_text(f"{ENVIRONMENTS}\n{name} = Quiet\n")
    assert main(["train", str(file), "--resume"]) == 0
    check_whole(tmp_path / "run", 2)


@pytest.mark.parametrize("name", ["Exits", "Cancelled", "CancelsItself"])
def test_one_that_fails_at_a_turn_each_time_costs_the_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["train", str(recipe(tmp_path, name))]) == 0
    assert "the environment failed at rollout" in capsys.readouterr().out
    row = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["episodes/failed"] == row["episodes/retried"] >= 1 and row["dropped/failed/groups"] == 0
    failed = [r for r in runs.records(tmp_path / "run") if r["stop_reason"] == "error"]
    assert failed and all("the environment failed at rollout" in r["error"] for r in failed)
    check_whole(tmp_path / "run", 2)


@pytest.mark.parametrize("on_timeout", ["missing", "score"])
def test_one_that_hangs_costs_its_rollouts_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], on_timeout: str
) -> None:
    words = ["--workflow.timeout_s=0.3", f"--workflow.on_timeout={on_timeout}"]
    words += ["--rollout.interrupt=never", "--rollout.in_flight_groups=3", "--rollout.max_staleness=0"]
    words += [f"--rollout.stop_token_ids={list(range(2, 14))}"]  # turns of eight tokens in the mean
    assert main(["train", str(recipe(tmp_path, "Hangs")), *words]) == 0
    out = capsys.readouterr().out
    assert out.count("exceeded workflow.timeout_s = 0.3 s: the rollout ends") == 1, "said once"
    assert "health: episodes/timeout_share" in out
    check_whole(tmp_path / "run", 2)
    row = runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["episodes/timeout"] == 3 and row["turns/max"] == 2 and row["tokens/environment"] > 0
    late = [r for r in runs.records(tmp_path / "run") if r["stop_reason"] == "timeout"]
    assert late and {r["score"] for r in late} == {None if on_timeout == "missing" else 0.0}
    assert main(["trace", str(tmp_path / "run")]) == 0
    assert "environments and agents worked" in capsys.readouterr().out


def test_where_it_fails_at_scoring_rewards_are_missing(tmp_path: Path) -> None:
    assert main(["train", str(recipe(tmp_path, "Fails"))]) == 0
    assert runs.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]["dropped/too_few_rewards/groups"] == 1
    errors = {r["error"] for r in runs.records(tmp_path / "run") if r["outcome"] == "dropped:too_few_rewards"}
    assert len(errors) == 1 and errors.pop().startswith("rollout.environment failed: KeyError: 'no judge' (")
    check_whole(tmp_path / "run", 2)


def test_evaluations_are_played_with_the_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recipe(tmp_path, "Told", 1)
    words = [str(file), "--eval.num_tasks=4", "--rollout.stop_token_ids=[2,3,4,5,6,7,8,9]"]
    assert main(["train", *words]) in (0, 2), "2 if all rewards of its one step are equal"
    before, after = runs.json_lines(tmp_path / "run" / "eval.jsonl")
    assert -2.0 <= before["mean"] < -1.0 and after["mean"] < -1.0, "most answers went on after they were told"
    capsys.readouterr()
    assert main(["eval", *words, "--model", str(tmp_path / "run" / "model"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] == pytest.approx(after["mean"])


DIALOGUE = """
from rollover.envs.protocol import written

class Dialogue:
    def __init__(self, setup):
        self.score, self.scores_singly = setup.score, setup.scores_singly

    async def next(self, rollout):
        turn = sum(not segment.trainable for segment in rollout.segments)
        return written(rollout, [7, 8]) if turn < 2 else None
"""


def dialogue(folder: Path) -> Path:
    folder.mkdir()
    (folder / "mine.py").write_text(DIALOGUE)
    # Turns of eight tokens in the mean: every twelfth token ends one.
    rollout = {"environment": f"{folder}/mine.py:Dialogue", "stop_token_ids": list(range(2, 14)), "max_new_tokens": 48}
    return runs.write(folder, steps=2, rollout=rollout, checkpoint={"every_steps": 0})


def test_a_run_does_not_go_on_without_the_environment_of_what_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = dialogue(tmp_path / "one")
    assert main(["train", str(file), "--train.num_steps=1"]) == 0
    environment = f"{file.parent}/mine.py:Dialogue"
    for other in ("single_turn", f"{file.parent}/mine.py:Other"):
        (file.parent / "mine.py").write_text(DIALOGUE + "\nOther = Dialogue\n")
        assert main(["train", str(file), "--resume", f"--rollout.environment={other}"]) == 2
        error = capsys.readouterr().err
        assert '--resume with rollout.environment = "' in error and "begun in it, and would go on in another" in error
        assert f'Set rollout.environment = "{environment}", or start a new run in another run.dir' in error
    assert main(["train", str(file), "--resume"]) == 0
    check_whole(file.parent / "run", 2)


def test_a_class_that_a_program_handed_over_is_mended_and_the_run_goes_on(tmp_path: Path) -> None:
    def environment(answer: str | None) -> type:
        source = f"class Mine(Quiet):\n    async def next(self, rollout):\n        return {answer!r}\n"
        names: dict[str, type] = {}
        exec(ENVIRONMENTS + source, names)
        return names["Mine"]

    file = runs.write(tmp_path, steps=2, checkpoint={"save_final_model": False})
    with pytest.raises(ValueError, match="it is a str, and no Segment. Mend it, and go on with --resume"):
        rollover.train(config=file, environment=environment("an answer"))
    rollover.train(resume=tmp_path / "run", environment=environment(None), trust=True)
    check_whole(tmp_path / "run", 2)
