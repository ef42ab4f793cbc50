"""The metric registry: every key is documented, wildcards match, and rows are reduced by kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollover.track.metric_keys import METRICS
from rollover.track.metrics import aggregate, find, markdown, validate

DOC = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_docs_are_the_registry() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "rollover.track.metrics"], capture_output=True, text=True, check=True, timeout=600
    ).stdout
    assert printed == markdown()
    assert DOC.read_text(encoding="utf-8") == printed, "run: python -m rollover.track.metrics > docs/metrics.md"
    documented = [line.split("`")[1] for line in printed.splitlines() if line.startswith("| `")]
    assert documented == [m.key for m in METRICS]


def test_keys_are_unique_and_explained() -> None:
    keys = [m.key for m in METRICS]
    assert len(keys) == len(set(keys))
    assert all(m.doc.endswith((".", ".)")) or m.doc.endswith(")") for m in METRICS)


def test_rates_name_registered_keys() -> None:
    for metric in METRICS:
        assert (metric.kind == "rate") == bool(metric.numerator) == bool(metric.denominator), metric.key
        for part in filter(None, (metric.numerator, metric.denominator)):
            found = find(part)
            assert found is not None and found.kind == "sum", f"{metric.key}: {part}"


@pytest.mark.parametrize(
    ("key", "registered"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/chain_sum/mean", "reward/{source}/mean"),
        ("reward/openai/gsm8k/mean", "reward/{source}/mean"),
        ("reward/extra/acc", "reward/extra/{name}"),
        ("dropped/stale/groups", "dropped/{reason}/groups"),
        ("dropped/stale/tokens", "dropped/{reason}/tokens"),
    ],
)
def test_placeholders(key: str, registered: str) -> None:
    found = find(key)
    assert found is not None and found.key == registered


@pytest.mark.parametrize(
    "key", ["reward", "reward/", "dropped/groups", "dropped//groups", "steps", "lossy", "reward/extra/"]
)
def test_unregistered_keys_are_our_error(key: str) -> None:
    with pytest.raises(AssertionError, match="not registered"):
        validate({"step": 1, key: 1.0})


@pytest.mark.parametrize("value", ["1", True, [1.0]])
def test_values_are_numbers(value: object) -> None:
    with pytest.raises(AssertionError, match="must be a number or None"):
        validate({"loss": value})


def test_aggregate_by_kind() -> None:
    rows = [
        {
            "step": 1,
            "reward/mean": 0.2,
            "tokens/generated": 100,
            "tokens/step_generated": 100,
            "time/generate_s": 1.0,
            "speed/generated_tokens_per_s": 100.0,
            "staleness/max": 3,
            "loss": float("nan"),
        },
        {
            "step": 2,
            "reward/mean": None,
            "tokens/generated": 400,
            "tokens/step_generated": 300,
            "time/generate_s": 4.0,
            "speed/generated_tokens_per_s": 75.0,
            "staleness/max": 1,
            "loss": None,
        },
        {"step": 3, "reward/mean": 0.6},
    ]
    assert aggregate(rows) == {
        "step": 3,
        "reward/mean": pytest.approx(0.4),
        "tokens/generated": 400,
        "tokens/step_generated": 400,
        "time/generate_s": 5.0,
        "speed/generated_tokens_per_s": 80.0,  # 400 / 5, not the mean of 100 and 75
        "staleness/max": 3,
        "loss": None,
    }


def test_a_name_in_a_key_may_be_any_text() -> None:
    """A reward's own values are the user's to name; what is wrong with a row is found after its step was trained."""
    validate({"reward/extra/two\nlines": 1.0})


def test_no_metric_has_the_name_of_a_folder_of_others() -> None:
    """MLflow keeps each in a file of its name: beside `a/b` there can be no `a`."""
    names = {metric.key for metric in METRICS} - {"time"}  # the time of the row, which trackers do not get as a metric
    assert not [name for name in names if any(other.startswith(f"{name}/") for other in names)]
