"""How many failures in a row end a run: what comes in between begins the count anew."""

from __future__ import annotations

import pytest

from rollover.config.rollout import RolloutConfig
from rollover.rollout.failure_limit import FailureLimit
from rollover.rollout.lifecycle import Lifecycle
from rollover.types import DropReason, Reward

TOO_MANY = 12  # four steps of three groups


def failure_limit() -> FailureLimit:
    return FailureLimit(Lifecycle(RolloutConfig(groups_per_step=3)))


def test_complete_group_resets_the_stall_count() -> None:
    told = failure_limit()
    for _ in range(3):
        for _ in range(TOO_MANY - 1):
            told.on_group_failed()
        told.on_complete()


def test_ready_group_resets_the_failure_count() -> None:
    told, failed = failure_limit(), [Reward(None, error="down")]
    for _ in range(3):
        for _ in range(2):  # of the three that end a run at its beginning
            told.on_dropped(DropReason.TOO_FEW_REWARDS, failed)
        told.on_dropped(DropReason.STALE, [Reward(1.0)])
    told.on_dropped(DropReason.TOO_FEW_REWARDS, failed)
    told.on_dropped(DropReason.TOO_FEW_REWARDS, failed)
    with pytest.raises(ValueError, match="none of the first 3 groups"):
        told.on_dropped(DropReason.TOO_FEW_REWARDS, failed)


def test_missing_reward_causes_are_sorted_by_frequency() -> None:
    told = failure_limit()
    of = [
        [Reward(None, error=f"no page {i}"), Reward(None, error=f"timed out after {i} s"), Reward(1.0)]
        for i in range(3)
    ]
    for rewards in (of[0], [*of[1], *of[1][1:]]):
        told.on_dropped(DropReason.TOO_FEW_REWARDS, rewards)
    with pytest.raises(ValueError) as raised:
        told.on_dropped(DropReason.TOO_FEW_REWARDS, of[2])
    assert "; 7 are missing: timed out after 2 s (4 times); no page 2 (3 times). Mend that, and go on" in str(
        raised.value
    )


def test_too_rare_roles_are_reported() -> None:
    told = failure_limit()
    with pytest.raises(ValueError, match="no reward is missing, so no role has so many trajectories in a group"):
        for _ in range(3):
            told.on_dropped(DropReason.TOO_FEW_REWARDS, [Reward(1.0), Reward(0.0)])
