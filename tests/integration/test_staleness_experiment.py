"""experiments/staleness_experiment.py for a few steps: the staleness is what it says, and only that differs."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

import staleness_experiment as experiment
from local_trainer import build_batch
from rollover.types import Group
from staleness_experiment import METHODS, Experiment, Result, Setting, run, run_all, table


def short(method: str, lag: int, steps: int = 2) -> Setting:
    return Setting(method, lag, seed=0, rate=1e-3, steps=steps)


def largest_difference(groups: list[Group], of: Experiment) -> float:
    """Between the log-probs that the engine sampled with and those of a trainer's weights."""
    samples = build_batch(groups, of.algorithm).samples
    found = of.trainer.backend.compute_logprobs(samples)
    return max(float(np.abs(found[s.rollout_id] - s.behavior_logprobs).max()) for s in samples)


def test_the_engine_samples_with_the_weights_of_so_many_versions_ago() -> None:
    async def batches() -> None:
        lagging, fresh = Experiment(short("decoupled", lag=1)), Experiment(short("decoupled", lag=1))
        await lagging.publish()
        previous: list[Group] = []
        for step, sampled_by in enumerate([0, 0, 1]):
            groups = await lagging.sample(step)
            assert lagging.engine.oldest_version == sampled_by
            assert {v for g in groups for r in g.rollouts for v in r.versions} == {sampled_by}
            # From the second batch on `fresh` is a training step behind.
            assert largest_difference(groups, fresh) < 1e-4
            if step:
                assert largest_difference(groups, lagging) > 1e-2
                fresh.trainer.train_step(build_batch(previous, fresh.algorithm))
            lagging.trainer.train_step(build_batch(groups, lagging.algorithm))
            await lagging.publish()
            previous = groups
        assert lagging.trainer.policy_version == 3

    asyncio.run(batches())


@pytest.mark.parametrize("method", METHODS)
def test_two_steps(method: str) -> None:
    result = run(short(method, lag=2))
    assert len(result.rewards) == 2 and all(0 < r < 0.5 for r in result.rewards), "a random model, on every version"
    assert result.metrics["grad_norm"] > 0
    gap = result.metrics["mismatch/logprob_abs_mean"]
    # The mean over a fresh step and a stale one; against itself the naive proximal policy has none.
    assert gap == 0 if method == "naive" else gap > 1e-3


def test_without_staleness_the_methods_are_one() -> None:
    results = [run(short(method, lag=0)) for method in METHODS]
    for result in results:
        assert result.rewards == results[0].rewards, "they sampled the same tokens"
        assert result.metrics["mismatch/logprob_abs_mean"] < 1e-5
        assert result.metrics["clip_fraction"] == pytest.approx(results[0].metrics["clip_fraction"], abs=1e-2)


def test_the_table_has_means_over_seeds_and_finished_runs_are_kept(tmp_path: Path, monkeypatch) -> None:
    metrics = {"clip_fraction": 0.25, "mismatch/logprob_abs_mean": 0.8}
    wanted = [Setting("decoupled", 4, seed) for seed in (0, 1)]
    rewards = {wanted[0]: [0.9] * 10 + [0.1] * 9 + [0.3], wanted[1]: [0.32] * 5 + [0.6] + [0.5] * 14}
    calls: list[Setting] = []

    def fake(setting: Setting) -> Result:
        calls.append(setting)
        return Result(setting, rewards[setting], metrics, seconds=1.0)

    monkeypatch.setattr(experiment, "run", fake)
    results = run_all(wanted, tmp_path / "runs.jsonl")
    again = run_all(wanted, tmp_path / "runs.jsonl")
    assert calls == wanted and [dataclasses.asdict(r) for r in again] == [dataclasses.asdict(r) for r in results]
    lines = table(again).splitlines()
    assert lines[2:] == ["| 4 | decoupled | **0.350** | 0.200, 0.500 | 0.725 | 0.485 | 0, 5 | 25.0 % | 0.80 |"]
