"""Warnings about figures out of their range."""

from __future__ import annotations

from pathlib import Path

import pytest

from heard import hear
from rollover.config import AlgorithmConfig, Config
from rollover.config.schema import field_at
from rollover.config.traits import ADVANTAGES
from rollover.track.build import TRACKERS, TrackerSetup
from rollover.track.health import PATIENCE, RANGES, Health
from rollover.track.metric_keys import METRICS


def test_health_warns_once_after_several_steps_out_of_range() -> None:
    health = Health()
    rows = [{"step": i + 1, "length/truncated": 0.5, "grad_norm": 0.1} for i in range(3 * PATIENCE)]
    found = [warning for row in rows for warning in health.look(row)]
    assert len(found) == 1
    assert "length/truncated = 0.5 has been above 0.3 for 5 steps" in found[0] and "max_new_tokens" in found[0]


def test_a_step_in_range_starts_the_count_anew() -> None:
    health = Health()
    values = [1e-5] * (PATIENCE - 1) + [0.1] + [1e-5] * (PATIENCE - 1)
    assert [w for i, v in enumerate(values) for w in health.look({"step": i, "grad_norm": v})] == []
    (warning,) = health.look({"step": 50, "grad_norm": 1e-5})
    assert "below 0.001" in warning


def test_a_low_reward_is_no_warning_at_first() -> None:
    health = Health()
    found = [i for i in range(1, 60) if health.look({"step": i, "reward/mean": 0.0})]
    assert found == [20 + PATIENCE]


def test_health_warns_at_once_about_a_nonfinite_gradient() -> None:
    health = Health()
    rows = [{"step": i + 1, "grad_norm": float("nan"), "train/skipped_steps": 1.0} for i in range(3 * PATIENCE)]
    (warning,) = [warning for row in rows for warning in health.look(row)]
    assert warning.startswith("train/skipped_steps = 1 is above 0: a gradient or the importance weights were not")
    assert "higher" not in warning
    assert Health().look(rows[0]) == [warning]


@pytest.mark.parametrize("wanted", RANGES, ids=lambda r: r.key)
def test_ranges_are_of_real_metrics_and_name_real_options(wanted) -> None:
    assert wanted.key in {m.key for m in METRICS}
    words = [w.strip(',;:"') for w in wanted.advice.split()]
    tables = ("rollout.", "train.", "algorithm.", "filters.")
    assert wanted.cause in {"", *(r.key for r in RANGES)}
    assert all(field_at(word) for word in words if word.startswith(tables))


@pytest.mark.parametrize(
    ("value", "wanted", "wrong"),
    [
        (1e-5, "try a higher train.learning_rate", "no token has a gradient"),
        (0.0, "no token has a gradient", "learning_rate"),
    ],
)
def test_health_advice_for_a_zero_gradient(value: float, wanted: str, wrong: str) -> None:
    health = Health()
    (warning,) = [w for i in range(2 * PATIENCE) for w in health.look({"step": i, "grad_norm": value})]
    assert wanted in warning and wrong not in warning


@pytest.mark.parametrize("grad_norm", [0.0, 1e-5], ids=["no gradient", "that of the KL term"])
def test_zero_variance_replaces_the_small_gradient_warning(grad_norm: float) -> None:
    """A streak of groups whose rewards are all equal: a higher learning rate would only hurt."""
    health = Health()
    rows = [{"step": i, "grad_norm": grad_norm, "groups/zero_variance": 1.0} for i in range(1, 3 * PATIENCE)]
    (warning,) = [warning for row in rows for warning in health.look(row)]
    assert warning.startswith("groups/zero_variance = 1 has been above 0.8 for 5 steps: in most groups all rewards are")
    assert all(word in warning for word in ("tasks", "rollout.temperature", "filters.zero_variance"))
    assert "learning_rate" not in warning
    # Where groups differ again and the gradient stays small, that is another matter: it is counted from there.
    later = [{"step": 50 + i, "grad_norm": grad_norm, "groups/zero_variance": 0.5} for i in range(PATIENCE)]
    warnings = [health.look(row) for row in later]
    assert not any(warnings[:-1]) and len(warnings[-1]) == 1 and warnings[-1][0].startswith("grad_norm = ")


def test_an_ignored_metric_suppresses_no_other_warning() -> None:
    """An advantage that compares no siblings learns from groups of equal rewards, too."""
    health = Health(["groups/zero_variance"])
    rows = [{"step": i, "grad_norm": 1e-5, "groups/zero_variance": 1.0} for i in range(1, 3 * PATIENCE)]
    (warning,) = [warning for row in rows for warning in health.look(row)]
    assert warning.startswith("grad_norm = ") and "learning_rate" in warning
    assert [name for name in ADVANTAGES if not AlgorithmConfig(advantage=name).advantage_traits.compares_siblings] == [
        "remax", "reinforce_plus_plus", "precomputed", "gae", "reinforce_plus_plus_tokens"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("distill", "told"),
    [
        ({}, ["groups/zero_variance", "reward/mean"]),
        ({"teacher": "other", "mix": "add"}, ["reward/mean"]),
        ({"teacher": "other"}, []),
    ],
    ids=["no teacher", "add", "replace"],
)
def test_equal_scores_are_ignored_with_a_teacher(distill: dict[str, str], told: list[str], tmp_path: Path) -> None:
    said: list[str] = hear([])
    config = Config.model_validate({"distill": distill})
    health = TRACKERS["health"](TrackerSetup(config, tmp_path))
    for step in range(1, 30):
        health.on_step({"step": step, "reward/mean": 0.0, "groups/zero_variance": 1.0, "grad_norm": 0.1})
    assert [text.split()[1] for text in said] == told


def test_what_is_no_number_is_no_warning_where_that_says_nothing() -> None:
    health = Health()
    row = {"reward/mean": float("nan"), "grad_norm": float("inf")}
    assert not [w for i in range(50) for w in health.look({"step": i, **row})]
