"""Who waits for whom: verdicts worked out by hand."""

from __future__ import annotations

import re

import pytest

from rollover.config import Config
from rollover.track import bottleneck
from rollover.track.bottleneck import find_bottleneck
from rollover.track.metrics import validate

AHEAD = "a larger rollout.max_staleness and rollout.in_flight_groups"


def times(step: float, generate: float = 0, score: float = 0, train: float = 0, **more: float) -> dict[str, float]:
    row = {"step": step, "generate": generate, "score": score, "train": train, **more}
    return {f"time/{name}_s": float(seconds) for name, seconds in row.items()}


def overlap(step: float, generate: float, score: float, trainer: float, rewards: float, **more: float):
    engine = {"wait/engine_for_trainer_s": float(trainer), "wait/engine_for_rewards_s": float(rewards)}
    return times(step, generate, score, train=step - generate - score, **more) | engine


@pytest.mark.parametrize(
    ("row", "bound", "text", "advice"),
    [
        # Generation takes 17 s and training 8 s, two steps ahead: the trainer waits for the difference.
        (
            overlap(20.1, 12.3, 0, 0, 0),
            "generation", "generation-bound: the trainer waited 12.3 of 20.1 s for rollouts",
            "more engine.threads or a larger engine.max_running",
        ),
        # The engine fills its room in 15 s and waits for the rest of the training.
        (
            overlap(20, 0, 0, 5, 0),
            "trainer", "trainer-bound: the engine stood idle 5.0 of 20.0 s",
            "fewer engine.threads or a larger train.micro_batch_tokens",
        ),
        # Rewards take 6 s, training 5 s, generation 1 s: both wait for the rewards.
        (
            overlap(7, 0, 2, 0, 4),
            "reward", "reward-bound: the trainer waited 2.0 of 7.0 s for rewards", "more rewards.num_workers",
        ),
        # Rewards are in time for the trainer, which never waits: faster ones would change nothing.
        (
            overlap(10, 0, 0, 1, 8),
            "trainer", "trainer-bound: the engine stood idle 9.0 of 10.0 s",
            "fewer engine.threads or a larger train.micro_batch_tokens",
        ),
        # Nothing may be held ahead: they take turns in spite of overlap.
        (overlap(20, 12, 0, 7, 0), "generation",
            "generation-bound: the trainer waited 12.0 of 20.0 s for rollouts", AHEAD),
        (overlap(20, 7, 0, 12, 0), "trainer", "trainer-bound: the engine stood idle 12.0 of 20.0 s", AHEAD),
        # More groups in flight would only wait for their rewards.
        (overlap(20, 0, 8, 5, 0), "reward",
            "reward-bound: the trainer waited 8.0 of 20.0 s for rewards", "more rewards.num_workers"),
        (overlap(20, 1, 0.5, 1.9, 0), "balanced",
            "balanced: the trainer waited 1.5 s, the engine 1.9 s of 20.0 s", ""),
        # Of 100 s, 80 are an evaluation and a checkpoint.
        (overlap(100, 2, 0, 0, 0, eval=50, checkpoint=30), "generation",
            "generation-bound: the trainer waited 2.0 of 20.0 s for rollouts",
            "more engine.threads or a larger engine.max_running"),
        (
            times(20, 10, 1, 6, weights=3),
            "generation", "in turns: generation 10.0 of 20.0 s; overlap saves at most 7.0 s",
            "rollout.overlap with rollout.max_staleness = 1",
        ),
        # With streaming micro-batches 8 of the 10 s of training were beside the generation already.
        (
            times(20, 18, 0, 10),
            "generation", "in turns: generation 18.0 of 20.0 s; overlap saves at most 2.0 s",
            "rollout.overlap with rollout.max_staleness = 1",
        ),
        (times(0.2, 0, 0, 0.17), "trainer", "in turns: training 0.17 of 0.20 s", "a larger train.micro_batch_tokens"),
        (times(20, 1, 15, 0.5), "reward", "in turns: rewards 15.0 of 20.0 s", "more rewards.num_workers"),
        (times(20, 19, 0, 1), "generation", "in turns: generation 19.0 of 20.0 s",
            'a larger engine.max_running or rollout.interrupt = "when_enough"'),
    ],
)  # fmt: skip
def test_verdict(row: dict[str, float], bound: str, text: str, advice: str) -> None:
    validate(row)
    found = find_bottleneck(row)
    assert found is not None
    assert (found.bound, found.text, found.advice) == (bound, text, advice)


@pytest.mark.parametrize("row", [{}, {"step": 3}, {"time/step_s": 0.0}, {"time/step_s": None, "time/generate_s": None}])
def test_no_times_no_verdict(row: dict[str, float | None]) -> None:
    assert find_bottleneck(row) is None


def test_waits_from_a_tenth_of_the_step_on() -> None:
    for waited, bound in ((1.99, "balanced"), (2.0, "generation")):
        found = find_bottleneck(overlap(20, waited, 0, 0, 0))
        assert found is not None and found.bound == bound


def test_every_option_that_is_advised_exists() -> None:
    advice = [*bottleneck._ADVICE_OVERLAPPED.values(), *bottleneck._ADVICE_SEQUENTIAL.values()]
    advice.append(bottleneck._ADVICE_BOTH_WAIT)
    options = {tuple(name.split(".")) for text in advice for name in re.findall(r"[a-z]+\.[a-z_]+", text)}
    assert len(options) >= 6
    for table, key in options:
        assert key in type(getattr(Config.model_validate({}), table)).model_fields, f"{table}.{key}"
