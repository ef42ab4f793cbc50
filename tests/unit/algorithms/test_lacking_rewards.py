"""Rewards of several functions, as estimators of several rewards see them."""

from __future__ import annotations

import math

import pytest

from rollover.algorithms.advantage import rewards_of
from rollover.config import AlgorithmConfig
from rollover.rewards.built_in import composite_spec
from rollover.types import Reward

NAMED = composite_spec([{"function": "a.py:digits"}, {"function": "a.py:even", "name": "evens"}])
REWARDS = [Reward(1.0, {"digits": 1.0}), Reward(1.5, {"digits": 1.0, "evens": 0.5})]


def test_inapplicable_reward_function_is_missing_reward() -> None:
    config = AlgorithmConfig.model_validate({"advantage": "gdpo", "reward_weights": {"digits": 1.0, "evens": 0.5}})
    found = rewards_of(REWARDS, [NAMED] * 2, config).tolist()
    assert found[1] == [1.0, 0.5] and found[0][0] == 1.0 and math.isnan(found[0][1])


@pytest.mark.parametrize(("name", "named"), [("event", NAMED), ("evens", "a.py:digits")])
def test_a_name_that_no_function_has_is_an_error(name: str, named: str) -> None:
    config = AlgorithmConfig.model_validate({"advantage": "gdpo", "reward_weights": {name: 1.0}})
    with pytest.raises(ValueError, match=f"names '{name}', which the reward"):
        rewards_of(REWARDS[:1], [named], config)
