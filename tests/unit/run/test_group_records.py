"""What left the run is recorded once, also where a write fails and is tried again."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from local_trainer import build_batch
from rollover.algorithms.shaping import Shaping
from rollover.config import AlgorithmConfig, Config, DistillConfig, RewardsConfig, WorkflowConfig
from rollover.plugins.dashboard.explain_advantage import explain_advantage
from rollover.plugins.dashboard.rollout_index import RolloutIndex
from rollover.plugins.dashboard.run_statistics import staleness_map
from rollover.rollout.ledger import Ledger
from rollover.rollout.lifecycle import Event, EventKind
from rollover.run.step_log import GroupRecords
from rollover.track.records import RolloutRecorder, read_records, read_rollouts
from rollover.track.tracker import RecordedGroup
from rollover.types import DropReason, Group, Prompt, Reward, Rollout, RolloutState, SamplingParams, StopReason
from unit.rollout.world import make_segment, make_task


class FullOnce(RolloutRecorder):
    full = True

    def write(self, step: int, groups: Sequence[RecordedGroup]) -> Path:
        if self.full:
            self.full = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(step, groups)


def test_dropped_group_is_recorded_after_a_failed_write(tmp_path: Path) -> None:
    """A step's, say: the checkpoint before the run ends has room again."""

    def decode(ids: Any) -> str:
        return ""

    records = GroupRecords(FullOnce(tmp_path), decode, Config())
    group = Group(0, make_task(0), Prompt((1, 2)), [Rollout(0, 0, make_task(0))])
    records.on_event(Event(EventKind.DROP, group, reason=DropReason.STALE))
    with pytest.raises(OSError, match="No space left"):
        records.on_groups(1, [], None)
    records.on_groups(1, [], None)
    records.on_groups(1, [], None)
    assert [[g.group_id for g in groups] for groups in read_rollouts(tmp_path, include_dropped=True)] == [[0]]


def test_recorded_advantage_is_the_mean_of_loss_tokens(tmp_path: Path) -> None:
    """By turns the returns are 2 and 1, and 1 and 1: less their mean 1.25 the two tokens of the first turn of the first
    rollout have 0.75, and the three of its second turn -0.25. What is out of the loss, or a critic's, has none."""

    def rollout(sibling: int, turns: list[float], reward: float | None) -> Rollout:
        segments = [
            make_segment(2, 0, StopReason.EOS),
            make_segment(1, 0, StopReason.PAUSED, trainable=False),
            make_segment(3, 0, StopReason.EOS),
        ]
        scored = Reward(reward, turns=turns, error=None if reward is not None else "e")
        return Rollout(0, sibling, make_task(0), segments, stop_reason=StopReason.EOS, reward=scored)

    scores = [rollout(0, [1.0, 0.0], 1.0), rollout(1, [0.0, 0.0], 1.0), rollout(2, [], None)]
    group = Group(0, make_task(0), Prompt((1, 2)), scores)
    by_turns = WorkflowConfig(credit="turn_returns")
    batch = build_batch([group], AlgorithmConfig(advantage="dr_grpo"), workflow=by_turns)
    with_critic = Config.model_construct(algorithm=AlgorithmConfig(advantage="gae"), distill=DistillConfig())
    for name, config in (("a", Config()), ("b", with_critic)):
        GroupRecords(RolloutRecorder(tmp_path / name), lambda ids: "", config).on_groups(1, [group], batch)
    told = [[record["advantage"] for record in read_records(tmp_path / name)] for name in "ab"]
    assert told[0] == pytest.approx([(2 * 0.75 - 3 * 0.25) / 5, -0.25, None]) and told[1] == [None] * 3


def test_greedy_rollout_is_recorded_as_baseline(tmp_path: Path) -> None:
    """Of 7 and 8 tokens the overlong penalty takes 0.5 and 1 off: the rewards are 0.5 and 0, and not both 1."""

    def rollout(sibling: int, num: int, score: float, temperature: float) -> Rollout:
        segment = replace(make_segment(num, 0, StopReason.EOS), sampling=SamplingParams(temperature=temperature))
        return Rollout(0, sibling, make_task(0), [segment], stop_reason=StopReason.EOS, reward=Reward(score))

    group = Group(0, make_task(0), Prompt((1, 2)), [rollout(0, 7, 1.0, 1.0), rollout(1, 8, 1.0, 0.0)])
    algorithm = AlgorithmConfig(advantage="remax")
    shaping = Shaping(RewardsConfig(overlong_buffer_tokens=2, overlong_penalty=1.0), max_new_tokens=8)
    batch = build_batch([group], algorithm, shaping=shaping)
    GroupRecords(RolloutRecorder(tmp_path), lambda ids: "", Config()).on_groups(1, [group], batch)
    records = list(read_records(tmp_path))
    assert [record["outcome"] for record in records] == ["trained", "dropped:baseline"]
    assert records[1]["credit"] == {
        "compared": None, "reward": 0.0, "terms": {"overlong": -1.0}, "kl_penalty": None, "left_out": None
    }  # fmt: skip
    assert records[0]["advantage"] == 0.5
    said = {
        of["about"]: of["text"] for of in explain_advantage(records[0], records, {"algorithm": {"advantage": "remax"}})
    }
    assert said["siblings"] == "The greedy answer to its task has 0." and said["rule"].endswith(": 0.5 - 0 = 0.5.")
    baseline = {
        of["about"]: of["text"] for of in explain_advantage(records[1], records, {"algorithm": {"advantage": "remax"}})
    }
    assert "overlong adds -1" in baseline["shaping"] and "never trained itself" in baseline["outcome"]
    (again,) = read_rollouts(tmp_path)
    assert [[r.rollout_id for r in g.rollouts if r.state is RolloutState.READY] for g in again] == [["0-0", "0-1"]]
    assert staleness_map(RolloutIndex(tmp_path))["counts"] == [[1]]  # which are those that were trained


def test_rollout_with_cancelled_call_is_recorded_as_dropped(tmp_path: Path) -> None:
    def rollout(sibling: int, reason: StopReason, reward: Reward) -> Rollout:
        segments = [make_segment(3, 0, reason)]
        return Rollout(0, sibling, make_task(0), segments, stop_reason=reason, reward=reward)

    given_up = rollout(0, StopReason.ABANDONED, Reward(None, error="the agent gave up a call of it"))
    others = [rollout(sibling, StopReason.EOS, Reward(float(sibling))) for sibling in (1, 2)]
    group = Group(0, make_task(0), Prompt((1, 2)), [given_up, *others])
    ledger = Ledger()
    ledger.on_consume(group)
    GroupRecords(RolloutRecorder(tmp_path), lambda ids: "", Config()).on_groups(
        1, [group], build_batch([group], AlgorithmConfig())
    )
    records = list(read_records(tmp_path))
    assert [record["outcome"] for record in records] == ["dropped:abandoned", "trained", "trained"]
    trained = sum(record["num_tokens"] for record in records if record["outcome"] == "trained")
    assert trained == ledger.trained.tokens and ledger.dropped[DropReason.ABANDONED].tokens == 3
    assert "gave up a call" in explain_advantage(records[0], records, {})[-1]["text"]
    (again,) = read_rollouts(tmp_path)
    assert [[r.rollout_id for r in g.rollouts if r.state is RolloutState.READY] for g in again] == [
        ["0-0", "0-1", "0-2"]
    ]
