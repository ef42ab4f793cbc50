"""Which evaluation is the best one, by a figure anywhere in its row; and when there were enough."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.config import EvalConfig
from rollover.track.jsonl import best_of, check_metric, early_stop_reason, metric_value

ROW: dict[str, Any] = {
    "step": 4,
    "mean": 0.5,
    "pass@4": 0.75,
    "sources": {"math/500": {"mean": 0.25, "pass@1": 0}},
    "settings": {"greedy": {"mean": 0.4, "data_sources": {"openai/gsm8k": {"maj@8": 0.6}}}},
}


def rows(*means: float | None) -> list[dict[str, Any]]:
    return [{"step": 2 * i, "mean": mean} for i, mean in enumerate(means)]


def test_metric_value_finds_names_with_slashes() -> None:
    assert metric_value(ROW, "mean") == 0.5 and metric_value(ROW, "pass@4") == 0.75
    assert metric_value(ROW, "sources/math/500/pass@1") == 0.0
    assert metric_value(ROW, "settings/greedy/data_sources/openai/gsm8k/maj@8") == 0.6
    assert metric_value(ROW, "settings/greedy/pass@1") is None and metric_value(ROW, "sources") is None
    check_metric(ROW, "settings/greedy/mean")
    with pytest.raises(ValueError, match='settings/greedy/mean.*Did you mean "sources/math/500/mean"'):
        check_metric(ROW, "sources/math500/mean")


def test_the_best_is_the_first_with_the_largest_figure() -> None:
    best = best_of(rows(0.1, 0.3, None, 0.3, 0.2), "mean")
    assert best is not None and best["step"] == 2
    assert best_of(rows(None), "mean") is None and best_of([], "mean") is None


@pytest.mark.parametrize(
    ("means", "margin", "enough"),
    [
        ((0.1, 0.2, 0.2), 0.0, False),  # one that is equal is no better
        ((0.1, 0.2, 0.2, 0.1), 0.0, True),
        ((0.1, 0.2, 0.1, 0.3, 0.3), 0.0, False),  # they must be in a row
        ((0.5, 0.1, None), 0.0, True),  # one without the figure is no better
        ((0.1, 0.15, 0.2, 0.25), 0.09, False),  # 0.2 exceeds 0.1, the best that counted
        ((0.1, 0.15, 0.18), 0.09, True),
        ((0.0,), 0.0, False),
    ],
)
def test_enough_is_patience_evaluations_in_a_row(means: tuple[float | None, ...], margin: float, enough: bool) -> None:
    config = EvalConfig(num_tasks=4, every_steps=2, patience=2, min_improvement=margin)
    why = early_stop_reason(rows(*means), config)
    assert bool(why) == enough and (not enough or "2 evaluations in a row" in why)
    assert not early_stop_reason(rows(*means), EvalConfig(num_tasks=4))
