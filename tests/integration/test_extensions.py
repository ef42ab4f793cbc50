"""One toy extension of each kind, from another distribution, and a run of the real program that uses them all.

Each is an entry point of the group of its kind (`rollover.engines`, ...), which the configuration names. A run has the
kinds that go together; the others are in runs of their own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import runs
from test_calculator_run import TEMPLATE

import tiny
from installed import install
from rollover import registry
from rollover.cli import main
from rollover.config import Config
from rollover.engine.remote.dialect import ServerDialect, make_dialect

STEPS = 2
# kind -> what the module has for it; each is registered as `toy`.
ATTRIBUTES = {
    "advantages": "estimator",
    "after_scoring": "doubled",
    "backends": "backend",
    "before_produce": "odd_ones",
    "clusters": "cluster",
    "curricula": "Any",
    "dialects": "dialect",
    "engines": "engine",
    "environments": "TwoTurns",
    "filters": "first_group",
    "groupings": "by_task",
    "hooks": "Hooks",
    "losses": "loss",
    "metrics": "metric",
    "orders": "order",
    "privileged": "privileged",
    "producers": "Producer",
    "rewards": "reward",
    "task_sources": "Sums",
    "tool_environments": "Guess",
    "tool_formats": "Shouted",
    "trackers": "Told",
    "verbs": "VERB",
    "workflows": "agent",
}
TOYS = '''
from rollover.commands.train import VERB as TRAIN
from rollover.commands import Verb
from rollover.envs.protocol import written
from rollover.cluster.protocol import ThisMachine
from rollover.track.tracker import Tracker
from rollover.trainer.local_backend import make_local
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
    from fake_engine import FakeEngine  # reward workers, which import this module too, do not have the tests' path

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


def backend(setup):
    """The local backend."""
    print("the toy backend")
    return make_local(setup)


def dialect(config):
    from rollover.engine.remote.vllm import VllmDialect

    print("the toy dialect")
    return VllmDialect(config)


def cluster(setup):
    print("the toy cluster")
    return ThisMachine()


def order(view):
    open("ordered", "w").close()
    return (view.admitted_at, view.group_id, view.sibling)


def doubled(rollouts, advantages):
    return advantages * 2


def odd_ones(task, version):
    """Leaves out every second problem."""
    return task if int(task.task_id.rpartition("/")[2]) % 2 else None


def first_group(group):
    return "it is the first" if group.group_id == 0 else None


class Hooks:
    def on_train_end(self, error):
        print("the toy hooks")


class Any:
    """A curriculum, which takes every task."""

    def __init__(self, config):
        print("the toy curriculum")

    def weight(self, task, seen):
        return 1.0


async def agent(task, episode):
    """A workflow of two questions in one trajectory."""
    trajectory = episode.trajectory()
    await trajectory.chat([{"role": "user", "content": task.prompt}])
    return 1.0


def by_task(episodes):
    """A grouping: all trajectories of a task."""
    from rollover.trajectories import TrajectoryGroup
    print("the toy grouping")
    return [TrajectoryGroup([t for episode in episodes for t in episode.trajectories])]


class Guess:
    """A tool environment."""

    def reset(self, **columns):
        return None

    def look(self) -> str:
        """Looks."""
        return "nothing"

    def get_reward(self):
        return 0.5


class Shouted:
    """A format of calls, which finds none."""

    def definitions(self, schemas):
        print("the toy format")
        return "Shout."

    def read(self, text):
        return []


class Producer:
    """Is never made."""


def privileged(task, messages):
    return messages


def verb(args, overrides):
    print("toys are about to train")
    args.resume = args.dry_run = False
    return TRAIN.run(args, overrides)


VERB = Verb("Train with toys.", verb)
'''


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an installed package beside this one."""
    site = tmp_path / "site"
    install(site, "toys", {kind: {"toy": f"toys:{attribute}"} for kind, attribute in ATTRIBUTES.items()})
    (site / "toys.py").write_text(TOYS)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    monkeypatch.chdir(tmp_path)
    yield site


def recipe(folder: Path, **tables: Mapping[str, Any]) -> Path:
    """A run of the toy source, engine and reward; `tables` change or add values."""
    values: dict[str, Any] = {
        "rewards": {"function": "toy"},
        "engine": {"kind": "toy"},
        "checkpoint": {"every_steps": 0, "save_final_model": False},
        "tasks": {"chat": False},
        "rollout": {"max_new_tokens": 16},
    }
    for table, of in tables.items():
        values[table] = values.get(table, {}) | of
    file = runs.write(folder, steps=STEPS, **values)
    before = file.read_text().partition("[[tasks.sources]]")[0]
    file.write_text(before + '[[tasks.sources]]\nkind = "toy"\nname = "toy"\n')
    return file


def test_registered_parts_act_in_a_run(toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables: dict[str, dict[str, Any]] = {
        "run": {"hooks": "toy"},
        "algorithm": {
            "advantage": "toy",
            "after_scoring": "toy",
            "loss": "toy",
            "correction": "none",  # else a weight for what the engine's log-probs are beside the trainer's
            "allow_uncorrected": True,
        },
        "backend": {"type": "toy"},
        "cluster": {"type": "toy"},
        "filters": {"custom": "toy"},
        "rollout": {"max_new_tokens": 16, "environment": "toy", "order": "toy"},
        "tasks": {"chat": False, "before_produce": "toy"},
        "tasks.curriculum": {"kind": "toy"},
        "track": {"metrics": "toy", "trackers": ["toy"]},
    }
    code = main(["toy", str(recipe(tmp_path, **tables))])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "toys are about to train" in said.out, "the verb"
    for part in ("backend", "cluster", "curriculum", "hooks"):
        assert f"the toy {part}" in said.out
    rows = runs.rows(tmp_path)
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
    assert {r["advantage"] for r in records} == {0.5}, "the estimator, doubled after scoring"
    assert 0 not in {r["group_id"] for r in records}, "the filter"
    assert {int(r["task_id"].rpartition("/")[2]) % 2 for r in records} == {1}, "what was asked before a task came"
    assert (tmp_path / "ordered").exists(), "the order"
    saved = json.loads((tmp_path / "run" / "config.resolved.json").read_text())
    assert saved["engine"]["kind"] == "toys:engine", "readers of the directory need no entry point"


@pytest.mark.parametrize(
    ("workflow", "part"),
    [
        ({"function": "toy", "group_by": "toy"}, "grouping"),
        ({"environment": "toy", "tool_format": "toy"}, "format"),
    ],
)
def test_registered_agents_act_in_a_run(workflow: dict[str, str], part: str, toys: Path, tmp_path, capsys) -> None:
    file = recipe(tmp_path, workflow=workflow, tasks={"chat": True}, engine={"kind": "embedded"})
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    code = main(
        ["train", str(file), "--rewards.function", "", "--algorithm.advantage", "toy", "--train.num_steps", "1"]
    )
    said = capsys.readouterr()
    assert code == 0, said.err
    assert f"the toy {part}" in said.out
    (row,) = runs.rows(tmp_path)
    assert row["reward/mean"] in (0.5, 1.0), "of the agent, or of the environment"


def test_registered_dialect_is_made(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remote = {"kind": "remote", "urls": ["http://127.0.0.1:1"], "weights_dir": str(toys), "dialect": "toy"}
    config = Config.model_validate({"engine": remote})
    assert isinstance(make_dialect(config), ServerDialect)
    assert "the toy dialect" in capsys.readouterr().out


def test_every_kind_has_a_toy() -> None:
    assert registry.KINDS.keys() == ATTRIBUTES.keys()
