"""Why an answer got its advantage: the sums shown are the estimators', and what changed it is said."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recorded_run import group, recorded
from rollover.algorithms import advantage
from rollover.plugins.dashboard.explain_advantage import calculation, explain_advantage
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.rollout_detail import rollout_detail
from rollover.track.records import RolloutRecorder
from rollover.track.token_stats import TokenStats
from rollover.track.tracker import RecordedCredit, RecordedGroup
from rollover.types import DropReason

rewards = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=6)


@given(rewards, st.sampled_from(["sample", "population", "none"]))
def test_the_sum_that_is_shown_is_the_estimators(values: list[float], std: Any) -> None:
    rewards_N, group_N = torch.tensor(values), torch.zeros(len(values), dtype=torch.int64)
    theirs = {
        "grpo": advantage.grpo(rewards_N, group_N, std=std),
        "dr_grpo": advantage.dr_grpo(rewards_N, group_N),
        "rloo": advantage.rloo(rewards_N, group_N),
        "max_rl": advantage.max_rl(rewards_N, group_N),
        "remax": advantage.remax(rewards_N, torch.full_like(rewards_N, 0.5)),
    }
    for name, expected in theirs.items():
        for own, wanted in zip(values, expected.tolist(), strict=True):
            found = calculation(name, values, own, 0.5, {"advantage_std": std})
            assert found is not None and found[1] == pytest.approx(wanted, rel=1e-4, abs=1e-5), name
            assert found[0].endswith(f"= {found[1]:.4g}") or "nothing to be compared" in found[0]


@pytest.mark.parametrize("std", ["sample", "population", "none"])
def test_what_differs_little_for_its_size_is_an_advantage(std: Any) -> None:
    values = [40_000.0, 40_000.03125, 40_000.0625, 40_000.0625]
    wanted = advantage.grpo(torch.tensor(values), torch.zeros(4, dtype=torch.int64), std=std)
    for own, expected in zip(values, wanted.tolist(), strict=True):
        found = calculation("grpo", values, own, None, {"advantage_std": std})
        assert found is not None and found[1] == pytest.approx(expected, rel=1e-3), found


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "max_rl"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e5 + 0.1])
def test_equal_rewards_give_no_advantage(name: str, value: float) -> None:
    found = calculation(name, [value] * 3, value, None, {})
    assert found is not None and found[1] == 0


def run(
    folder: Path,
    scores: Sequence[float | None] = (1.0, 0.0, 0.5),
    config: Mapping[str, Any] | None = None,
    dropped: DropReason | None = None,
    tokens: TokenStats | None = None,
    **credit: Any,
) -> dict[str, str]:
    """What is said of the first rollout of a recorded group, by what it is about. `credit`: of the first alone."""
    of: RecordedGroup = recorded(group(7, scores), dropped)
    credits = [RecordedCredit(0, score, {}) for score in scores]
    credits[0] = replace(credits[0], **credit)
    if dropped is None:
        of = replace(of, credits=credits, tokens=[tokens, *[None] * (len(scores) - 1)])
    RolloutRecorder(folder / "rollouts").write(1, [of])
    (folder / "config.resolved.json").write_text("{}")
    found = rollout_detail(IndexedRun(folder), 1, "7-0")
    records = list(IndexedRun(folder).rollouts.records())
    sentences = explain_advantage(records[0], records, config or {})
    assert [s["about"] for s in found["why"]][0] == "score"
    return {s["about"]: s["text"] for s in sentences}


def test_from_the_score_to_the_advantage(tmp_path: Path) -> None:
    said = run(tmp_path, config={"algorithm": {"advantage": "grpo", "advantage_std": "sample"}})
    assert said["score"] == "The reward function own gave it 1."
    assert said["siblings"] == (
        "Compared with its siblings, the rewards are 1, 0, 0.5: mean 0.5, standard deviation 0.5."
    )
    assert said["rule"].endswith(": (1 - 0.5) / (0.5 + 0.0001) = 0.9998.")
    assert said["advantage"] == "Its advantage is 0.25: its reward asks for more of it."


def test_what_shaping_and_a_KL_made_of_the_score(tmp_path: Path) -> None:
    config = {"algorithm": {"advantage": "dr_grpo"}, "rewards": {"clip_range": [-1, 1]}}
    said = run(tmp_path, config=config, reward=0.5, terms={"overlong": -0.5, "repetition": 0.0}, kl_penalty=0.1)
    assert said["shaping"] == "Then overlong adds -0.5; it is bounded to [-1, 1]: the reward that is trained is 0.5."
    assert said["KL"] == "The KL to the reference policy takes 0.1 off it."
    assert "the rewards are 0.4, 0, 0.5: mean 0.3," in said["siblings"] and said["rule"].endswith("0.4 - 0.3 = 0.1.")


def test_what_left_the_run_without_an_advantage(tmp_path: Path) -> None:
    assert "dropped (stale)" in run(tmp_path / "a", dropped=DropReason.STALE)["outcome"]
    said = run(tmp_path / "b", left_out="truncated: ended at the length limit", reward=None)
    assert said["left out"] == "None of its tokens is in the loss: truncated: ended at the length limit."
    assert said["reward"] == "Its reward counts as missing."
    missing = run(tmp_path / "c", scores=(None, 1.0), reward=None)
    assert missing["score"] == "It has no score: it raised."
    record: dict[str, Any] = {
        "outcome": "trained", "score": 1.0, "extras": None, "reward": "own", "error": None, "segments": [], "role": "a"
    }  # fmt: skip
    assert "by an earlier version" in explain_advantage(record, [record], {})[-1]["text"]
    assert "replay was trained in its place" in explain_advantage(record | {"credit": None}, [], {})[-1]["text"]


def test_other_rules_are_said_in_words(tmp_path: Path) -> None:
    def rule(name: str, **config: Any) -> dict[str, str]:
        return run(tmp_path / name, config={"algorithm": {"advantage": name}, **config})

    assert "over the whole step" in rule("gdpo")["rule"]
    assert rule("mine.py:own")["rule"] == "mine.py:own: a custom function."
    turns = rule("rloo", workflow={"credit": "turn_returns", "roles": {"policy": {"weight": 0.5}}})
    assert "over the returns of all turns" in turns["rule"] and "=" not in turns["rule"].partition("turn_returns")[2]
    assert turns["role"] == "Its role policy has the weight 0.5."
    taught = rule("grpo", distill={"teacher": "policy", "mix": "replace", "roles": []})
    assert taught["rule"].startswith("By token: log teacher/policy")


def test_what_became_of_its_tokens(tmp_path: Path) -> None:
    stats = TokenStats(
        mask=np.array([True, True, True]),
        rejected=np.array([False, False, True]),
        advantages=np.full(3, 0.25, np.float32),
        importance_weights=np.array([0.5, 3.0, 9.0], np.float32),
        loss_weights=np.array([0.5, 0.0, 0.0], np.float32),
        entropies=np.array([0.1, 0.2, math.nan], np.float32),
    )
    algorithm = {"advantage": "grpo", "loss": "clip", "correction": "token_mask", "rejection": {"token_k2": 1.5}}
    said = run(tmp_path, config={"algorithm": algorithm}, tokens=stats)
    assert said["tokens"] == "3 of its 3 tokens came to the loss."
    assert said["rejection"] == "1 of these were rejected (algorithm.rejection: token_k2 within 1.5)."
    assert said["importance"].startswith("Importance weights (now / as sampled) are 0.5 to 9")
    assert said["weight"].startswith("In the loss their advantages are multiplied by 0 to 0.5 (algorithm.loss = clip")
    assert said["clipped"].startswith("1 of them have no gradient")
    nothing = replace(stats, rejected=np.zeros(3, bool), advantages=np.zeros(3, np.float32), **{
        name: np.full(3, np.nan, np.float32) for name in ("importance_weights", "loss_weights", "entropies")
    })  # fmt: skip
    assert "skip_zero_advantage" in run(tmp_path / "b", tokens=nothing)["not computed"]


def test_weights_below_0_are_not_taken_for_rejected_ones(tmp_path: Path) -> None:
    """As the loss `dro` has them."""
    numbers = {name: np.ones(3, np.float32) for name in ("advantages", "importance_weights", "entropies")}
    stats = TokenStats(
        mask=np.ones(3, bool),
        rejected=np.array([False, True, False]),
        loss_weights=np.array([-0.5, 0.0, 2.0], np.float32),
        **numbers,
    )
    said = run(tmp_path, config={"algorithm": {"loss": "dro", "rejection": {"token_k2": 1.5}}}, tokens=stats)
    assert said["weight"].startswith("In the loss their advantages are multiplied by -0.5 to 2 ")
    assert "clipped" not in said


@pytest.mark.parametrize(
    "name, std, words",
    [
        ("grpo", {"advantage_std": "sample"}, ", divided by their standard deviation: ("),
        ("grpo", {"advantage_std": "none"}, "the reward less the mean of those compared: "),
        ("grpo", {"advantage_std": "batch"}, ", divided by the standard deviation of the whole step."),
        ("sum_then_normalize", {"advantage_std": "none"}, "less the mean of those compared."),
        ("gdpo", {"advantage_std": "none"}, "each reward by itself less its mean in the group, summed by"),
        ("gdpo", {"advantage_std": "sample"}, "in the group, divided by their standard deviation, summed by"),
        ("grpo_passk", {"passk_std": "none", "advantage_std": "sample"}, "on average."),
        ("grpo_passk", {"passk_std": "sample"}, "on average, divided by their standard deviation."),
    ],
)
def test_rule_divides_by_the_deviation_of_the_run(tmp_path: Path, name: str, std: dict[str, str], words: str) -> None:
    assert words in run(tmp_path, config={"algorithm": {"advantage": name, **std}})["rule"]


def test_explanation_of_tokens_with_different_advantages(tmp_path: Path) -> None:
    stats = TokenStats(
        mask=np.ones(3, bool),
        rejected=np.zeros(3, bool),
        advantages=np.array([1.0, -0.5, 0.25], np.float32),
        importance_weights=np.ones(3, np.float32),
        loss_weights=np.ones(3, np.float32),
        entropies=np.ones(3, np.float32),
    )
    turns = {"workflow": {"credit": "turn_returns"}}
    told = run(tmp_path / "a", config={"algorithm": {"advantage": "rloo"}, **turns}, tokens=stats)
    assert told["advantage"] == "Its advantage is 0.25 in the mean of its tokens."
    assert told["by token"] == "Their advantages are -0.5 to 1."
    untold = run(tmp_path / "b", config={"algorithm": {"advantage": "rloo"}, **turns})
    assert untold["advantage"] == told["advantage"], "without token_stats nobody knows"
    teacher = {"distill": {"teacher": "policy", "mix": "add", "roles": []}}
    taught = run(tmp_path / "c", config={"algorithm": {"advantage": "rloo"}, **teacher}, tokens=stats)
    assert taught["advantage"] == "Its advantage is 0.25 by its reward."


def test_what_was_not_trained_though_it_had_an_advantage(tmp_path: Path) -> None:
    """The step ended before, or the backend does not tell."""
    nothing = np.full(3, np.nan, np.float32)
    stats = TokenStats(np.ones(3, bool), np.zeros(3, bool), np.full(3, 0.25, np.float32), nothing, nothing, nothing)
    ended = run(tmp_path / "a", config={"train": {"max_kl": 0.01}}, tokens=stats)["not computed"]
    assert "train.max_kl" in ended and "skip_zero" not in ended
    assert "did not report" in run(tmp_path / "b", config={"train": {"max_kl": 0.0}}, tokens=stats)["not computed"]


def test_explanation_of_several_rewards(tmp_path: Path) -> None:
    algorithm = {"advantage": "gdpo", "reward_weights": {"correct": 1.0, "format": 0.5}}
    said = run(tmp_path / "a", config={"algorithm": algorithm})["siblings"]
    assert "the scores are 1, 0, 0.5:" in said and said.endswith("What counts is correct by 1.0, format by 0.5.")
    alone = run(tmp_path / "b", config={"algorithm": {"advantage": "gdpo", "reward_weights": {}}})["siblings"]
    assert "the rewards are 1, 0, 0.5:" in alone


@pytest.mark.parametrize(
    "config", [{"workflow": {"function": "agents.py:talk"}}, {"rollout": {"environment": "games.py:Guess"}}]
)
def test_who_plays_may_have_scored_it(tmp_path: Path, config: dict[str, Any]) -> None:
    said = run(tmp_path, config=config)["score"]
    assert said.startswith("It was scored 1 by its agent or environment, or where these score nothing by the reward")


def test_a_role_that_is_not_trained_has_no_missing_reward(tmp_path: Path) -> None:
    said = run(tmp_path, compared=None, reward=None, left_out="untrained_role: its role is not trained")
    assert "reward" not in said and said["left out"].endswith("its role is not trained.")
