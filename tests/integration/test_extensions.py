"""One toy extension of each kind, from outside the package, and a run of the real program that uses them all.

Named by `module:name` in the configuration; the verb, which starts the run, by an entry point. CONTRIBUTING.md has the
table of the doors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs

from rollover.cli import main

STEPS = 2
TOYS = '''
from rollover.commands.train import VERB as TRAIN
from rollover.commands.verb import Verb
from rollover.engine.fake import FakeEngine
from rollover.envs.protocol import written
from rollover.track.tracker import Tracker
from rollover.types import Task


class Sums:
    """A source of tasks."""

    def __init__(self, setup):
        self.setup = setup

    def problem(self, index):
        name, (a, b) = self.setup.label, divmod(index, 100)
        return Task(f"{name}/{index}", name, self.setup.reward, prompt=f"{a} + {b} =", columns={"answer": str(a + b)})


def engine(setup):
    """Each answer has three to eleven tokens."""
    return FakeEngine(lambda seed: 3 + seed % 9, vocab_size=100, turns_between_steps=4)


def reward(data_source, solution_str, ground_truth, extra_info):
    """Which also has a value of its own."""
    return {"score": float(len(solution_str) % 2), "toy": int(ground_truth) - int(ground_truth) + 4}


class TwoTurns:
    """After the policy's first turn the environment says a word of two tokens, and the policy goes on."""

    def __init__(self, setup):
        self.score, self.scores_singly = setup.score, setup.scores_singly

    async def next(self, rollout):
        return written(rollout, [7, 7]) if all(s.trainable for s in rollout.segments) else None


def estimator(rewards, groups):
    return rewards * 0 + 0.25


def loss(t):
    return t.logprobs_BT - t.logprobs_BT.detach() + 7, t.mask_BT & False


def metric(groups):
    return {"longest": max(rollout.num_tokens for group in groups for rollout in group.rollouts)}


class Told(Tracker):
    """A tracker, which writes down the steps and the groups that it is told of."""

    def on_start(self, run):
        self.path = run.directory / "told.txt"

    def on_groups(self, step, groups):
        self.num_groups = len([group for group in groups if group.dropped is None])

    def on_step(self, row):
        with self.path.open("a") as file:
            print(row["step"], self.num_groups, file=file)


def verb(args, overrides):
    print("toys are about to train")
    args.resume = args.dry_run = False
    return TRAIN.run(args, overrides)


VERB = Verb("Train with toys.", verb)
'''


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package beside this one."""
    site = tmp_path / "site"
    metadata = site / "toys-1.dist-info"
    metadata.mkdir(parents=True)
    (site / "toys.py").write_text(TOYS)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[rollover.verbs]\ntoytrain = toys:VERB\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    yield


def recipe(folder: Path) -> Path:
    file = runs.write(
        folder,
        steps=STEPS,
        rewards={"function": "toys:reward"},
        engine={"kind": "toys:engine"},
        algorithm={
            "advantage": "toys:estimator",
            "loss": "toys:loss",
            "correction": "none",  # else a weight for what the engine's log-probs are beside the trainer's
            "allow_uncorrected": True,
        },
        track={"metrics": "toys:metric", "trackers": ["toys:Told"]},
        checkpoint={"every_steps": 0, "save_final_model": False},
        tasks={"chat": False},
        rollout={"max_new_tokens": 16, "environment": "toys:TwoTurns"},
    )
    before = file.read_text().partition("[[tasks.sources]]")[0]
    file.write_text(before + '[[tasks.sources]]\nkind = "toys:Sums"\nname = "toy"\n')
    return file


def test_a_toy_of_each_kind_acts_in_a_run(
    toys: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["toytrain", str(recipe(tmp_path))])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "toys are about to train" in said.out, "the verb"
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    records: list[dict[str, Any]] = [r for r in runs.records(tmp_path / "run") if r["outcome"] == "trained"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)) and len(records) == STEPS * 9
    for row in rows:
        assert "reward/toy/mean" in row, "the source, under its name"
        assert row["reward/extra/toy"] == 4, "the reward"
        assert row["loss"] == pytest.approx(7), "the loss"
        assert 3 <= row["own/longest"] <= 14, "the metric, of what the engine made"
    first, word = {r["segments"][0]["num_tokens"] for r in records}, {r["token_ids"][-3:-1] == [7, 7] for r in records}
    assert first <= set(range(1, 12)), "the engine, or what it had made of the first turn as the step ended"
    assert word == {True}, "the environment, before the last token"
    assert (tmp_path / "run" / "told.txt").read_text() == "1 3\n2 3\n", "the tracker"
    assert {r["advantage"] for r in records} == {0.25}, "the estimator"
    assert all(json.loads(r["columns"])["answer"].isdigit() for r in records if r["columns"]), "the source's columns"
