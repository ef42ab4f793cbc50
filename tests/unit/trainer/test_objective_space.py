"""Properties of every accepted configuration of [algorithm], over 1,000 drawn ones; the slow tests draw 2,000."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from objective_space import HERE, SEVERAL_UPDATES, VALUES, Drawn, draw, load, objective_of

from rollover.config import AlgorithmConfig, Config, FiltersConfig
from rollover.config.load import ConfigError
from rollover.trainer.objective import Objective

NUMS = (1000, pytest.param(2000, marks=pytest.mark.slow))
WEIGHTS = ("algorithm.correction", "algorithm.correction_cap", "algorithm.correction_floor")
# Two names of one thing, as docs/algorithms.md says.
SYNONYMS = (
    {"gspo", "luspo"},  # apart by the aggregation
    {"clip", "decoupled"},  # correction = "token_truncate"
    {"grpo", "sum_then_normalize"},  # the score alone
    {"grpo", "dr_grpo"},  # advantage_std = "none"
    {"sum_then_normalize", "dr_grpo"},
    {"optimal_token_baseline", "tir_optimal_token_baseline"},  # answers without gaps
)


@pytest.fixture(autouse=True)
def one_thread():
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


OF_THE_WEIGHT = ("loss", "proximal", "correction", "correction_cap", "correction_floor", "clip_low", "clip_high")


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)


def weight_alone(config: Config) -> Config:
    """Of what depends on the probability that a token was sampled with: others drop tokens by it, and weigh none."""
    plain = AlgorithmConfig(**{key: getattr(config.algorithm, key) for key in OF_THE_WEIGHT})
    return config.model_copy(update={"algorithm": plain, "filters": FiltersConfig()})


@pytest.mark.parametrize("num", NUMS)
def test_stale_rollouts_are_corrected_or_it_was_permitted(num: int) -> None:
    """The loss of stale tokens depends on the probability that they were sampled with."""
    rng = random.Random(1)
    seen: dict[str, bool] = {}
    permitted = 0
    for _ in range(num):
        config = draw(rng, off_policy=True).config
        algorithm = config.algorithm
        permitted += algorithm.allow_uncorrected
        if algorithm.allow_uncorrected:
            continue
        config = weight_alone(config)
        name = f"{config.algorithm} {config.rollout.on_stale} {config.rollout.max_staleness}"
        if name not in seen:
            seen[name] = any(
                not same(objective_of(config, seed), objective_of(config, seed, behavior_shift=0.3))
                for seed in range(8)
            )
        assert seen[name], algorithm
    assert len(seen) > 100 and permitted


def test_later_updates_of_a_step_are_corrected_or_it_was_permitted() -> None:
    """The loss depends on the log-probs from before the step's first update: it holds how far the policy has moved."""
    rng = random.Random(3)
    seen: dict[str, bool] = {}
    permitted = 0
    for _ in range(500):
        config = draw(rng, off_policy=False, always=rng.choice(SEVERAL_UPDATES)).config
        permitted += config.algorithm.allow_uncorrected
        if config.algorithm.allow_uncorrected:
            continue
        config = weight_alone(config)
        name = str(config.algorithm)
        if name not in seen:
            seen[name] = any(
                not same(objective_of(config, seed), objective_of(config, seed, before_update=0.3)) for seed in range(8)
            )
        assert seen[name], config.algorithm
    assert len(seen) > 50 and permitted


def acts(before: Config, after: Config, num_batches: int) -> bool:
    """On one of so many random batches: a threshold may leave the same tokens on any one of them."""
    return any(not same(objective_of(before, seed), objective_of(after, seed)) for seed in range(num_batches))


def is_synonym(key: str, drawn: Drawn, value: object) -> bool:
    algorithm = drawn.config.algorithm
    if key == "algorithm.loss_options":
        # So small a batch seldom has more candidates than the share; tests/parity compares it.
        return algorithm.loss == "clip_cov" and {*algorithm.loss_options, *value} <= {"share"}  # type: ignore[misc]
    if key == "algorithm.advantage_counts":
        own = algorithm.advantage_traits.counts
        return {algorithm.advantage_counts or own} == {value or own}
    if key in WEIGHTS and algorithm.rejection:
        # What is kept is near the behavior policy: nothing of it may be above the cap, or below the floor.
        return True
    return isinstance(value, str) and {getattr(algorithm, key.partition(".")[2], None), value} in SYNONYMS


@pytest.mark.parametrize("num", NUMS)
def test_every_key_of_an_accepted_configuration_acts_or_its_change_is_refused(num: int) -> None:
    rng = random.Random(2)
    acted, refused = Counter[str](), Counter[str]()
    keys = [*sorted(VALUES), *3 * ["algorithm.loss_options"]]  # few of which are of the loss that is drawn with them
    for i in range(num):
        key = keys[i % len(keys)]
        drawn = draw(rng, about=key)
        value = rng.choice([v for v in VALUES[key] if v != drawn.values[key]])
        try:
            changed = load(drawn.preset, drawn.values | {key: value})
            Objective(changed.algorithm, 16)
        except (ConfigError, ValueError):
            refused[key] += 1
            continue
        may_be_the_same = is_synonym(key, drawn, value)
        if acts(drawn.config, changed, 3 if may_be_the_same else 60):
            acted[key] += 1
        else:
            assert may_be_the_same, (key, value, drawn.preset, drawn.values)
    permission = {"algorithm.allow_uncorrected"}  # it changes nothing but what is refused
    assert {key for key in VALUES if acted[key] < num // 400} == permission and refused[HERE] == 0
