"""Rollout modes in real runs: combinations, the sequential reference, streamed groups."""

from __future__ import annotations

import asyncio
import copy
import itertools
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import safetensors.numpy
import torch

import tiny
from local_trainer import build_batch, local_trainer
from rollover.cli import main
from rollover.config import AlgorithmConfig, EngineConfig, RolloutConfig, TrainConfig
from rollover.config.load import ConfigError, load_config
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.envs.build import SingleTurn
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Lifecycle
from rollover.rollout.requests import Requests
from rollover.trainer.trainer import Trainer
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, SamplingParams, Task, rollout_seed

# Modes, staleness, replay, re-roll, filters, streaming, KV policies: every pair; all of them under `slow`


MODES: dict[str, dict[str, Any]] = {
    "never": {"interrupt": "never"},
    "when_enough": {"interrupt": "when_enough"},
    "token_budget": {"interrupt": "token_budget", "token_budget": 16},
    "supplement": {"interrupt": "when_enough", "supplement": True},
    "one step off": {"overlap": True, "interrupt": "never"},
    "fully async": {"overlap": True, "interrupt": "on_weight_update"},
}
AXES: dict[str, list[Any]] = {
    "mode": list(MODES),
    "staleness": [1, 2],
    "replay": [0, 6],
    "reroll": [0, 1],
    "kv": ["recompute", "keep", "salt"],
    "filters": ["none", "groups", "both"],
    "streaming": [0, 1],
}
# A reward of digits alone rarely differs between two siblings that are cut off early: some groups go, some stay.
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "groups": {"zero_variance": True, "give_up_after_steps": 50},
    "both": {
        "pass_rate_below": 1.0,
        "pass_threshold": 0.03,
        "give_up_after_steps": 50,
        "mask_truncated": True,
        "mask_in_baseline": False,
    },
}
# With streaming the reward is of one sample, so that rollouts are scored as they stop.
EACH = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(c.isdigit() for c in solution_str) / 48
"""
Case = tuple[Any, ...]
ALL: list[Case] = list(itertools.product(*AXES.values()))


def pairwise(cases: list[Case]) -> list[Case]:
    """Few of the cases that hold every pair of values of two axes: greedy."""

    def pairs(case: Case) -> set[tuple[int, Any, int, Any]]:
        return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2)}

    missing, chosen = set().union(*map(pairs, cases)), []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def recipe(folder: Path, case: Case, steps: int = 3) -> Path:
    mode, staleness, replay, reroll, kv, filters, streaming = case
    kv_on_resume = {} if mode == "never" else {"kv_on_resume": kv}
    (folder / "each.py").write_text(EACH)
    return runs.write(
        folder,
        steps=steps,
        rollout={
            "groups_per_step": 2, "group_size": 2, "max_new_tokens": 32, "max_staleness": staleness,
            "in_flight_groups": 2 * (staleness + (mode != "supplement")), **kv_on_resume, **MODES[mode],
        },
        replay={"size": replay, "max_staleness": 6} if replay else {},
        reroll={"max_groups": reroll, "start_fraction": 0.0, "failed_at_most": 0.5} if reroll else {},
        filters=FILTERS[filters],
        rewards={"function": f"{folder / 'each.py'}:compute_score"} if streaming else {},
        train={"streaming_min_groups": streaming},
        checkpoint={"every_steps": 1, "keep": 1, "save_final_model": False},
        watchdog={"rollout_timeout_s": 60.0},
    )  # fmt: skip


def check(folder: Path, steps: int) -> None:
    """The ledger balanced in every row, no token was beyond its bound, and nothing was trained twice."""
    rows = runs.rows(folder)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["groups/admitted"] == row["groups/consumed"] + row["groups/dropped"] + row["groups/held"]
        by_filter = sum(value for key, value in row.items() if key.startswith("filtered/"))
        assert row["dropped/filtered/groups"] == by_filter
        assert row["staleness/max"] <= row["staleness/bound"]
        assert row.get("staleness/replayed_max", 0) <= 6
    trained = [r["rollout_id"] for r in runs.records(folder / "run") if r["outcome"] == "trained"]
    assert len(trained) == len(set(trained)) == steps * 4


def name(case: Case) -> str:
    return "-".join(map(str, case))


PAIRS = pairwise(ALL)


def test_the_pairs_are_all_there() -> None:
    for (i, first), (j, second) in itertools.combinations(enumerate(AXES.values()), 2):
        assert {(c[i], c[j]) for c in PAIRS} == set(itertools.product(first, second))
    assert len(PAIRS) < len(ALL) / 4


@pytest.mark.parametrize("case", PAIRS, ids=name)
def test_pairs(tmp_path: Path, case: Case) -> None:
    assert main(["train", str(recipe(tmp_path, case))]) == 0
    check(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case not in PAIRS], ids=name)
def test_all(tmp_path: Path, case: Case) -> None:
    assert main(["train", str(recipe(tmp_path, case))]) == 0
    check(tmp_path, 3)


# DESIGN test 6: synchronous training equals the sequential program, bit for bit (fp32, CPU, fixed threads)


STEPS, GROUPS, SIZE, TOKENS = 4, 3, 4, 24
STOP = frozenset({1})


def tasks():
    for i in range(1000):
        text = f"count to {i}"
        yield Task(f"t{i}", "test", "digits", prompt=text), Prompt.of(tiny.tokenizer()(text)["input_ids"])


def score(token_ids: list[int]) -> Reward:
    return Reward(sum(c.isdigit() for c in tiny.tokenizer().decode(token_ids)) / TOKENS)


def parts() -> tuple[EmbeddedEngine, Trainer]:
    loaded = tiny.loaded()
    engine = EmbeddedEngine(copy.deepcopy(loaded.model), EngineConfig())
    train = TrainConfig(num_steps=STEPS, learning_rate=1e-3, micro_batch_tokens=200, minibatches_per_step=GROUPS)
    return engine, local_trainer(loaded, train, AlgorithmConfig(), dtype=torch.float32, max_new_tokens=TOKENS)


async def sequential() -> tuple[Trainer, list[list[int]]]:
    """The whole algorithm without scheduler, cache or driver."""
    engine, trainer = parts()
    stream, seen = tasks(), []
    for step in range(STEPS):
        groups = []
        for g in range(GROUPS):
            task, prompt = next(stream)
            groups.append(
                Group(step * GROUPS + g, task, prompt, [Rollout(step * GROUPS + g, s, task) for s in range(SIZE)])
            )
        rollouts = [r for group in groups for r in group.rollouts]
        prompts = [group.prompt for group in groups for _ in group.rollouts]
        answers = await asyncio.gather(
            *[
                engine.extend(
                    ExtendRequest(
                        r.rollout_id, prompt, (), TOKENS,
                        rollout_seed(0, r.task.task_id, 0, r.sibling), SamplingParams(), StopCriteria(STOP),
                    )
                )
                for r, prompt in zip(rollouts, prompts, strict=True)
            ]
        )  # fmt: skip
        for rollout, segments in zip(rollouts, answers, strict=True):
            for segment in segments:
                rollout.add(segment)
            rollout.state = RolloutState.READY
            rollout.reward = score(rollout.token_ids())
            seen.append(rollout.token_ids())
        trainer.train_step(build_batch(groups, AlgorithmConfig()))
        await engine.load_weights(trainer.policy_version, await trainer.backend.publish())
    return trainer, seen


async def scheduled() -> tuple[Trainer, list[list[int]]]:
    """The same through the driver, with rewards that arrive late and out of order."""
    engine, trainer = parts()
    stream, seen = tasks(), []

    async def scorer(rollouts: list[Rollout]) -> list[Reward]:
        for _ in range(7 * (5 - rollouts[0].group_id % 5)):
            await asyncio.sleep(0)
        return [score(r.token_ids()) for r in rollouts]

    config = RolloutConfig(groups_per_step=GROUPS, group_size=SIZE, max_new_tokens=TOKENS)
    driver = Driver(Lifecycle(config), engine, lambda: next(stream), SingleTurn(scorer), Requests(config, 0, STOP))
    for _ in range(STEPS):
        groups = await driver.collect(trainer.policy_version)
        assert groups is not None
        seen += [r.token_ids() for g in groups for r in g.rollouts]
        trainer.train_step(build_batch(groups, AlgorithmConfig()))
        await engine.load_weights(trainer.policy_version, await trainer.backend.publish())
        driver.on_new_version(trainer.policy_version)
        driver.lifecycle.check()
    return trainer, seen


def test_synchronous_training_equals_the_sequential_program() -> None:
    (a, tokens_a), (b, tokens_b) = asyncio.run(sequential()), asyncio.run(scheduled())
    assert tokens_a == tokens_b and len(tokens_a) == STEPS * GROUPS * SIZE
    start = dict(tiny.model().named_parameters())
    for (name, x), y in zip(tiny.local(a).model.named_parameters(), tiny.local(b).model.parameters(), strict=True):
        assert torch.equal(x, y), name
        assert not torch.equal(x, start[name]), f"{name} was not trained"


# Streaming in the real loop: rollouts scored as they stop, gradients of groups as they get ready, one update


SLOW = '''
import hashlib, os, time

HERE = os.path.dirname(__file__)

def note(name):
    """How many times this was called."""
    file = os.open(f"{HERE}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b"x")
    size = os.fstat(file).st_size
    os.close(file)
    return size

def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)

def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Share of digits, after a time that differs from rollout to rollout."""
    time.sleep(0.002 + 0.03 * (hashlib.md5(solution_str.encode()).digest()[0] % 2))
    call = note("calls")
    if os.path.exists(f"{HERE}/parts") and call > 1 and (call - 1) % 9 == 0:
        # The last of the nine rollouts of a step, after the probe's: what is ready is trained while this one takes.
        before = os.path.getsize(f"{HERE}/parts")
        wait_for(lambda: os.path.getsize(f"{HERE}/parts") > before, 3)
    if os.path.exists(f"{HERE}/hold") and call > 14:
        note("held")  # in the middle of the second step
        wait_for(lambda: not os.path.exists(f"{HERE}/hold"), 120)
    return sum(c.isdigit() for c in solution_str) / 48
'''
SYNC = {"in_flight_groups": None, "interrupt": "never", "max_staleness": None}
FULLY_ASYNC = {"overlap": True, "interrupt": "on_weight_update", "in_flight_groups": 6, "max_staleness": 1}


def slow_recipe(folder: Path, **tables: Any) -> Path:
    tables = {"rewards": {"function": f"{folder / 'slow.py'}:compute_score", "num_workers": 2}} | tables
    path = runs.write(folder, **tables)
    (folder / "slow.py").write_text(SLOW)
    return path


def train(folder: Path, **tables: Any) -> list[dict[str, float]]:
    assert main(["train", str(slow_recipe(folder, **tables))]) == 0
    rows = runs.rows(folder)
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["staleness/max"] <= row["staleness/bound"]
    return rows


def weights(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(next((folder / "run" / "model").glob("*.safetensors")))


def assert_close(ours: Path, theirs: Path) -> None:
    before, after = weights(ours), weights(theirs)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(value, after[name], atol=2e-5)


@pytest.fixture
def spied_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[set[int]]:
    """Ids of the groups of every part that was accumulated before its step."""
    seen: list[set[int]] = []
    plain = Trainer.accumulate

    def spy(self: Trainer, samples: list) -> None:
        seen.append({s.group_id for s in samples})
        if (tmp_path / "streaming" / "parts").exists():
            with (tmp_path / "streaming" / "parts").open("a") as file:
                file.write("x")
        plain(self, samples)

    monkeypatch.setattr(Trainer, "accumulate", spy)
    return seen


def test_a_synchronous_run_learns_the_same(tmp_path: Path, spied_parts: list[set[int]]) -> None:
    plain = train(tmp_path / "plain", rollout=SYNC, train={"adam_eps": 1e-3})
    assert not spied_parts
    (tmp_path / "streaming").mkdir()
    (tmp_path / "streaming" / "parts").touch()
    streaming = train(tmp_path / "streaming", rollout=SYNC, train={"adam_eps": 1e-3, "streaming_min_groups": 1})
    assert len(spied_parts) >= 4, "a step of three groups has parts"
    for one, other in zip(plain, streaming, strict=True):
        for key in ("reward/mean", "tokens/generated", "tokens/step_trained", "length/mean", "staleness/max"):
            assert one[key] == other[key]
        for key in ("loss", "grad_norm", "entropy", "ratio/mean", "train/zero_advantage_tokens"):
            assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5)
    assert_close(tmp_path / "plain", tmp_path / "streaming")


@pytest.mark.parametrize("mode", ["partial", "fully async"])
def test_with_replay_in_every_mode(tmp_path: Path, spied_parts: list[set[int]], mode: str) -> None:
    """A group without a signal waits for the end of its step: it may be replaced."""
    tables: dict[str, Any] = {"train": {"streaming_min_groups": 1}, "replay": {"size": 6, "max_staleness": 6}}
    rows = train(tmp_path, steps=8, rollout=FULLY_ASYNC if mode == "fully async" else {}, **tables)
    assert len(rows) == 8 and len(spied_parts) > 8
    trained = [group_id for part in spied_parts for group_id in part]
    assert len(trained) == len(set(trained))


def test_a_stop_in_the_middle_of_a_step_loses_nothing(tmp_path: Path) -> None:
    """The gradient of the groups that were ready is forgotten, and they are trained after the restart."""
    tables = {"rollout": SYNC, "train": {"adam_eps": 1e-3, "streaming_min_groups": 1}, "steps": 6}
    train(tmp_path / "whole", **tables)
    file = slow_recipe(tmp_path / "stopped", **tables)
    (tmp_path / "stopped" / "hold").touch()
    process = runs.start("train", file)
    deadline = time.monotonic() + 600
    while not (tmp_path / "stopped" / "held").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    (tmp_path / "stopped" / "hold").unlink()
    assert process.wait(timeout=600) == 130
    assert len(runs.json_lines(tmp_path / "stopped" / "run" / "metrics.jsonl")) < 6
    assert main(["train", str(file), "--resume"]) == 0
    assert_close(tmp_path / "whole", tmp_path / "stopped")


REFUSED = {
    "minibatches_per_step": {"train": {"minibatches_per_step": 3}},
    "advantage_std": {"algorithm": {"advantage_std": "batch"}},
    "after_scoring": {"algorithm": {"after_scoring": "hooks.py:look"}},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_needs_the_whole_step_is_refused(tmp_path: Path, word: str) -> None:
    tables = {table: dict(values) for table, values in REFUSED[word].items()}
    tables.setdefault("train", {})["streaming_min_groups"] = 1
    with pytest.raises(ConfigError, match=word):
        load_config([slow_recipe(tmp_path, **tables)])
