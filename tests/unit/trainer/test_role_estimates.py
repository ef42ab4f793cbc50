"""Roles whose advantages a step estimates over tokens: statistics and weight of each role, and what is told of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_trainer import TOGETHER, trainer

from local_trainer import build_batch
from rollover import Played, ready_episodes
from rollover.algorithms.grouping import Grouping
from rollover.algorithms.shaping import Shaping
from rollover.config import AlgorithmConfig, RewardsConfig, WorkflowConfig
from rollover.run.batch_metrics import role_metrics
from rollover.trainer.batch import sampled
from rollover.trainer.trainer import Trainer
from rollover.types import Group, Reward, Sample, StopReason, Task
from unit.rollout.world import make_segment

TASK = Task("t0", "s", "r", prompt="x")
SOLVER, JUDGE = (-0.5, 0.2, 0.9, 1.5), (98.5, 100.0, 101.5, 104.5)
OVER_TOKENS = pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus_tokens"])


def groups(num: int = 2) -> list[Group]:
    """Of a solver and a judge whose scores are of another scale; answers of 2 to 5 tokens."""

    def played(role: str, score: float, tokens: int) -> Played:
        return Played([((5, 6), [make_segment(tokens, 0, StopReason.EOS, first=9)])], Reward(score), role)

    scores = list(enumerate(zip(SOLVER, JUDGE, strict=True)))
    episodes = [[played("solver", a, 2 + i), played("judge", b, 5 - i)] for i, (a, b) in scores]
    return [ready_episodes(g, TASK, episodes) for g in range(num)]


def workflow(**roles: float) -> WorkflowConfig:
    return WorkflowConfig.model_validate({"roles": {role: {"weight": weight} for role, weight in roles.items()}})


def trained(name: str, of: WorkflowConfig, **more: Any) -> tuple[Trainer, dict[str, float]]:
    """A trainer after one step of these groups."""
    made = trainer({"advantage": name, **more})
    return made, made.train_step(build_batch(groups(), made.algorithm, workflow=of))


def of_role(samples: list[Sample], role: str) -> np.ndarray:
    return np.concatenate([s.advantages[s.mask] for s in samples if s.role == role])


@OVER_TOKENS
def test_a_role_alone_has_the_same_advantages_beside_another(name: str) -> None:
    both, _ = trained(name, workflow(solver=1.0, judge=1.0))
    alone, _ = trained(name, WorkflowConfig.model_validate({"roles": {"solver": {}, "judge": {"trained": False}}}))
    np.testing.assert_allclose(of_role(both.trained, "solver"), of_role(alone.trained, "solver"), atol=1e-5)


@OVER_TOKENS
def test_the_weight_of_a_role_multiplies_its_advantages(name: str) -> None:
    full, _ = trained(name, workflow(solver=1.0, judge=1.0))
    quarter, _ = trained(name, workflow(solver=0.25, judge=1.0))
    np.testing.assert_allclose(of_role(quarter.trained, "solver"), of_role(full.trained, "solver") / 4, atol=1e-6)
    np.testing.assert_allclose(of_role(quarter.trained, "judge"), of_role(full.trained, "judge"), atol=1e-6)


def test_the_critic_learns_rewards_without_the_weight() -> None:
    full, quarter = (trained("gae", workflow(solver=w, judge=w))[1] for w in (1.0, 0.25))
    assert quarter["critic/explained_variance"] == pytest.approx(full["critic/explained_variance"], rel=1e-6)
    assert quarter["critic/grad_norm"] == pytest.approx(full["critic/grad_norm"], rel=1e-6)


@OVER_TOKENS
def test_roles_that_a_group_compares_share_their_statistics(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(TOGETHER)
    made, _ = trained(name, WorkflowConfig(group_by="own.py:together"))
    values = np.concatenate([of_role(made.trained, role) for role in ("solver", "judge")])
    assert values.mean() == pytest.approx(0, abs=1e-5) and of_role(made.trained, "solver").max() < 0


@OVER_TOKENS
def test_advantages_are_told_as_the_loss_had_them(name: str) -> None:
    of = workflow(solver=0.5, judge=1.0)
    made, _ = trained(name, of)
    batch = build_batch(groups(), made.algorithm, workflow=of)
    metrics = role_metrics(groups(), type(batch)(made.trained), Grouping(of))
    assert metrics["roles/solver/advantage_std"] == pytest.approx(0.5, rel=0.05)
    assert metrics["roles/judge/advantage_std"] == pytest.approx(1.0, rel=0.05)


def test_a_weight_comes_after_the_kl_of_the_reward() -> None:
    """As for every other estimator: w * estimator(score - kl)."""
    algorithm = {"advantage": "optimal_token_baseline", "kl_in": "reward", "kl_coef": 0.1, "kl_kind": "k1"}
    found = []
    for weight in (1.0, 0.25):
        made = trainer(algorithm)
        assert made.reward_kl is not None
        penalties = made.reward_kl.penalties(sampled(groups()))
        tokens = {name: of + 0.5 * np.arange(len(of), dtype=np.float32) for name, of in penalties.tokens.items()}
        of = workflow(solver=weight, judge=1.0)
        made.train_step(build_batch(groups(), made.algorithm, workflow=of, penalties=replace(penalties, tokens=tokens)))
        found.append(of_role(made.trained, "solver"))
    np.testing.assert_allclose(found[1], found[0] / 4, atol=1e-6)


@pytest.mark.parametrize("kind", ["scale", "whiten"])
def test_running_statistics_are_over_one_role(kind: str) -> None:
    shaping = Shaping(RewardsConfig.model_validate({"running_norm": kind}), 8)
    algorithm = AlgorithmConfig(advantage="dr_grpo")
    for version in range(2):
        batch = build_batch(groups(), algorithm, shaping=shaping, version=version)
    for role, scores in (("solver", SOLVER), ("judge", JUDGE)):
        every = [score for score in scores for _ in range(4)]  # two groups, two steps
        std = np.std(every, ddof=1)
        assert batch.credited.shaped.metrics[f"roles/{role}/running_std"] == pytest.approx(std)
        assert batch.credited.shaped.metrics[f"roles/{role}/running_mean"] == pytest.approx(np.mean(every))
        wanted = (np.array(scores) - np.mean(scores)) / std
        of_group = [s.advantages[0] for s in batch.samples if s.role == role and s.group_id == 0]
        np.testing.assert_allclose(of_group, wanted, atol=1e-5)
    resumed = Shaping(shaping.config, 8)
    resumed.load_state_dict(json.loads(json.dumps(shaping.state_dict())))
    again = build_batch(groups(), algorithm, shaping=resumed, version=2)
    wanted = build_batch(groups(), algorithm, shaping=shaping, version=2)
    assert again.credited.shaped.metrics == wanted.credited.shaped.metrics


def test_running_statistics_of_compared_roles_are_of_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(TOGETHER)
    shaping = Shaping(RewardsConfig(running_norm="scale"), 8)
    algorithm, of = AlgorithmConfig(advantage="dr_grpo"), WorkflowConfig(group_by="own.py:together")
    metrics = build_batch(groups(), algorithm, workflow=of, shaping=shaping).credited.shaped.metrics
    std = np.std([*SOLVER, *JUDGE] * 2, ddof=1)
    assert metrics["roles/solver/running_std"] == metrics["roles/judge/running_std"] == pytest.approx(std)
