"""Replay in the batch: what replaces what, and the importance weights of replayed tokens against a hand computation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_trainer import TOGETHER, plain_logprobs, plain_model, trainer

import tiny
from rollover import Played, ready_episodes
from rollover.config import Config
from rollover.run.batch_metrics import staleness_metrics
from rollover.tasks.reroll import Reroll
from rollover.trainer.batch import Batch, BatchBuilder
from rollover.trainer.reuse import Reuse
from rollover.types import Group, Reward, StopReason, Task
from samples import group, rollout, segment

CAP = 1.2
PARTIAL = {"interrupt": "when_enough", "in_flight_groups": 16, "on_stale": "mask"}


def config(**tables: dict[str, Any]) -> Config:
    values = {"replay": {"size": 4, "max_staleness": 3}, "algorithm": {"advantage": "dr_grpo", "correction_cap": CAP}}
    return Config.model_validate(values | tables)


def reuse(of: Config) -> Reuse:
    return Reuse(of, Reroll(of.reroll, of.train.num_steps, lambda: None))


def two(
    group_id: int, scores: tuple[float | None, float | None], version: int = 0, tokens: tuple[int, int] = (20, 30)
) -> Group:
    """A group of two rollouts of two tokens each."""
    return group(
        group_id,
        [
            rollout(group_id, i, score, [segment([tokens[i], tokens[i] + group_id], version=version, logprob=-4.0 - i)])
            for i, score in enumerate(scores)
        ],
    )


def build(r: Reuse, groups: list[Group], version: int) -> Batch:
    return BatchBuilder(r.config, r.buffer).build(groups, version)


def step(r: Reuse, groups: list[Group], version: int) -> Batch:
    batch = build(r, groups, version)
    r.after_step(groups, batch, version)
    return batch


def ids(batch: Batch) -> list[int]:
    return sorted({s.group_id for s in batch.samples})


def test_a_group_without_signal_gives_its_place_to_a_kept_one() -> None:
    r = reuse(config())
    assert ids(step(r, [two(0, (1.0, 0.0)), two(1, (1.0, 1.0))], 0)) == [0, 1], "nothing is kept yet"
    batch = step(r, [two(2, (0.0, 0.0), 1), two(3, (0.0, 0.0), 1), two(4, (0.5, 0.0), 1)], 1)
    assert ids(batch) == [0, 3, 4] and batch.replayed == {0}, "as many groups as before, in group-id order"
    assert [s.rollout_id for s in batch.samples] == ["0-0", "0-1", "3-0", "3-1", "4-0", "4-1"]
    replayed = batch.samples[0]
    assert replayed.versions.tolist() == [0, 0] and replayed.behavior_logprobs.tolist() == [-4.0, -4.0]
    assert [float(s.advantages[0]) for s in batch.samples] == [0.5, -0.5, 0.0, 0.0, 0.25, -0.25]
    assert (r.replayed_groups, r.replayed_tokens) == (1, 4)
    # Without a signal, or replayed: not kept (again). Score of 4: 0.5 * (0.5 / sqrt 2).
    assert [(k.group.group_id, round(k.score, 4)) for k in r.buffer.kept] == [(0, 0.7071), (4, 0.1768)]


def test_a_group_with_a_signal_is_never_replaced() -> None:
    r = reuse(config())
    step(r, [two(0, (1.0, 0.0))], 0)
    assert ids(step(r, [two(1, (1.0, 0.0), 1)], 1)) == [1]
    assert r.replayed_groups == 0


def test_replay_has_a_bound_and_a_metric_of_its_own() -> None:
    r = reuse(config(replay={"size": 1, "max_staleness": 3}))
    step(r, [two(0, (2.0, 0.0), 0)], 0)  # of a higher score than those that come after it
    ages = []
    for version in range(1, 5):
        batch = step(r, [two(version, (0.0, 0.0), version), two(9 + version, (0.0, 1.0), version)], version)
        metrics = staleness_metrics(batch, version, {})
        assert metrics["staleness/max"] == 0
        ages.append(metrics.get("staleness/replayed_max"))
    assert ages == [1, 2, 3, None] and r.buffer.stale == 1


def test_statistics_over_the_batch_are_those_of_what_is_trained() -> None:
    r = reuse(config(algorithm={"advantage": "grpo", "advantage_std": "batch"}))
    step(r, [two(0, (4.0, 0.0))], 0)
    batch = step(r, [two(1, (0.0, 0.0), 1), two(2, (1.0, 0.0), 1)], 1)
    std = float(np.std([4.0, 0.0, 1.0, 0.0], ddof=1))
    assert [float(s.advantages[0]) for s in batch.samples] == pytest.approx(
        [2 / std, -2 / std, 0.5 / std, -0.5 / std], rel=1e-3
    )


def test_tokens_that_were_masked_in_their_own_step_stay_masked() -> None:
    of = config(rollout=PARTIAL | {"max_staleness": 1}, replay={"size": 4, "max_staleness": 4})
    r = reuse(of)
    mixed = [segment([10], version=1), segment([11, 12], version=2)]
    first = group(0, [rollout(0, 0, 1.0, mixed), rollout(0, 1, 0.0, [segment([13], version=3)])])
    assert step(r, [first], 3).samples[0].mask.tolist() == [False, True, True]
    batch = step(r, [group(1, [rollout(1, i, 0.0, [segment([9], version=6)]) for i in (0, 1)])], 6)
    assert batch.replayed == {0} and batch.samples[0].mask.tolist() == [False, True, True]
    assert staleness_metrics(batch, 6)["staleness/replayed_max"] == 4


def test_off_keeps_and_replaces_nothing() -> None:
    r = reuse(config(replay={"size": 0}))
    step(r, [two(0, (1.0, 0.0))], 0)
    assert ids(step(r, [two(1, (0.0, 0.0), 1)], 1)) == [1] and len(r.buffer) == 0 and r.metrics() == {}


def test_failed_tasks_are_queued_with_the_version_after_the_step() -> None:
    r = reuse(config(train={"num_steps": 4}, reroll={"max_groups": 1, "start_fraction": 0.5}))
    step(r, [two(0, (0.0, 0.0)), two(1, (1.0, 0.0))], 0)
    assert r.reroll() is None, "a quarter of the run is done"
    step(r, [two(2, (1.0, 0.0), 1)], 1)
    task, _ = r.reroll() or (None, ())
    assert task is not None and task.task_id == "t0", "half of it is"


def test_state_round_trip() -> None:
    of = config(reroll={"max_groups": 1, "start_fraction": 0.0})
    r = reuse(of)
    step(r, [two(0, (1.0, 0.0)), two(1, (0.0, 0.0))], 0)
    step(r, [two(2, (0.0, 0.0), 1), two(3, (0.3, 0.0), 1)], 1)
    state, arrays = r.state_dict()
    again = reuse(of)
    again.load_state_dict(json.loads(json.dumps(state)), arrays, 2, 100)
    assert again.metrics() == r.metrics() and again.metrics()["replay/size"] == 2
    fresh = [two(4, (0.0, 0.0), 2)]
    ours, theirs = build(again, fresh, 2), build(r, fresh, 2)
    assert ids(ours) == ids(theirs) and ours.replayed == theirs.replayed and again.reroll() == r.reroll()
    narrower = reuse(config(replay={"size": 4, "max_staleness": 1}))
    narrower.load_state_dict(state, arrays, 2, 100)
    assert [k.group.group_id for k in narrower.buffer.kept] == [3]
    off = reuse(config(replay={"size": 0}))
    off.load_state_dict(state, arrays, 2, 100)
    assert (off.buffer.kept, off.buffer.stale, off.buffer.evicted) == ([], 0, 0), "what is off stays empty"


# Importance weights


@pytest.mark.parametrize("minibatches", [1, 2])
def test_importance_weights_are_rebuilt_at_each_use(minibatches: int) -> None:
    """Loss of a step by hand: -1/N sum_t min(exp(proximal_t - behavior_t), cap) A_t, at current = proximal.

    The group is replayed in three steps between which the weights move: behavior log-probs are those stored, proximal
    ones those of the step's start.
    """
    of = config(train={"learning_rate": 3e-3, "minibatches_per_step": minibatches})
    r = reuse(of)
    t = trainer(of.algorithm, learning_rate=3e-3, minibatches_per_step=minibatches)
    first = [two(0, (1.0, 0.0)), two(1, (0.0, 2.0), tokens=(40, 50))]
    batch = build(r, first, 0)
    t.train_step(batch)
    r.after_step(first, batch, 0)
    seen: list[float] = []
    for version in (1, 2, 3):
        fresh = [two(10 * version, (0.0, 0.0), version), two(10 * version + 1, (0.0, 0.0), version)]
        batch = build(r, fresh, version)
        assert batch.replayed == {0, 1} == set(ids(batch))
        frozen, weights, losses = plain_model(tiny.local(t).model), [], []
        for s in batch.samples:
            proximal = plain_logprobs(frozen, s).tolist()
            ratios = [float(np.exp(p + 4.0 + int(s.rollout_id[-1]))) for p in proximal]
            weights += ratios
            losses += [-min(ratio, CAP) * float(s.advantages[0]) for ratio in ratios]
        metrics = t.train_step(batch)
        assert metrics["importance/mean"] == pytest.approx(np.mean(weights), rel=1e-4)
        assert metrics["importance/max"] == pytest.approx(max(weights), rel=1e-4)
        if minibatches == 1:  # else the second one's current weights have moved
            assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
        seen.append(metrics["importance/mean"])
        r.after_step(fresh, batch, version)
    assert max(seen) / min(seen) > 1.02, "the weights moved, and so did the importance weights"


def test_snapshot_proximal_covers_replayed_versions() -> None:
    """proximal = "snapshot": of a replayed token it is the log-prob under the weights that sampled it."""
    of = config(algorithm={"advantage": "dr_grpo", "proximal": "snapshot"})
    r = reuse(of)
    t = trainer(of.algorithm, learning_rate=3e-3, max_staleness=3)
    first = two(0, (1.0, 0.0))
    exact = t.backend.compute_logprobs(build(r, [first], 0).samples)
    for one in first.rollouts:  # sampled exactly as the weights of version 0 do
        one.segments[0] = dataclasses.replace(one.segments[0], logprobs=exact[one.rollout_id])
    batch = build(r, [first], 0)
    t.train_step(batch)
    r.after_step([first], batch, 0)
    for version in (1, 2, 3):
        fresh = [two(10 + version, (0.0, 0.0), version)]
        batch = build(r, fresh, version)
        assert batch.replayed == {0}
        metrics = t.train_step(batch)
        assert metrics["importance/max"] == pytest.approx(1.0, abs=1e-4) and metrics["ratio/max"] > 1.01
        r.after_step(fresh, batch, version)


def test_masked_group_has_no_signal_at_every_use() -> None:
    r = reuse(config(filters={"mask_truncated": True, "mask_in_baseline": False}))
    kept = group(0, [rollout(0, i, score, [segment([20 + i])]) for i, score in enumerate((1.0, 0.0, 5.0))])
    kept.rollouts[2].stop_reason = StopReason.LENGTH
    first = step(r, [kept], 0)
    assert [s.mask.any() for s in first.samples] == [True, True, False]
    assert [float(s.advantages[0]) for s in first.samples] == [0.5, -0.5, 0.0]
    (only,) = r.buffer.kept
    assert only.score == pytest.approx(1.0 * 0.5**0.5), "the masked reward has no part in it"
    cut = two(1, (1.0, 0.0), 1)
    for of in cut.rollouts:
        of.stop_reason = StopReason.LENGTH
    batch = step(r, [cut], 1)
    assert batch.replayed == {0}, "nothing of the other is in the loss"
    assert [s.mask.any() for s in batch.samples] == [True, True, False]
    assert [m.rollout.rollout_id for m in batch.masked.rollouts] == ["0-2"]


@pytest.mark.parametrize(
    ("filters", "groups", "version", "why"),
    [
        (
            {"mask_overlong": True, "overlong_tokens": 1},
            [two(0, (1.0, 0.0))],
            0,
            "of 2 rollouts 2 are masked by a filter",
        ),
        ({}, [two(0, (None, None))], 0, "of 2 rollouts 2 have no reward"),
        ({}, [two(0, (1.0, 0.0))], 3, "of 2 rollouts 2 have no token of policy version 3 or later"),
        ({}, [two(0, (1.0, 0.0)), two(1, (1.0, None))], 3, "of 4 rollouts 3 have no token of .*, 1 have no reward"),
    ],
)
def test_step_without_loss_token_raises_with_reason(
    filters: dict[str, Any], groups: list[Group], version: int, why: str
) -> None:
    rollout = PARTIAL | {"max_staleness": 0}
    with pytest.raises(ValueError, match=f"step {version + 1} has no token in its loss: {why}"):
        build(reuse(config(filters=filters, rollout=rollout)), groups, version)


def test_replay_keeps_precomputed_multi_role_groups(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOGETHER)
    roles = {role: {"advantage": "precomputed"} for role in "ab"}
    grouping = f"{tmp_path}/mine.py:together"
    r = reuse(config(workflow={"function": "mine.py:agents", "roles": roles, "group_by": grouping}))
    answer = dataclasses.replace(segment([20, 21], logprob=-4.0), stop_reason=StopReason.EOS)
    of = [Played([((5,), [answer])], Reward(1.0, advantages=2.0), role) for role in "ab"]
    step(r, [ready_episodes(0, Task("t", "s", "r", prompt="x"), [of, of])], version=0)
    assert r.metrics()["replay/size"] == 1
