"""The best evaluation of a run, and early stopping, from the rows of eval.jsonl. Pure.

The rows are the only state: a resumed run has the rows up to its checkpoint, so it decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollover.config import EvalConfig
from rollover.suggest import did_you_mean

Row = Mapping[str, Any]


def metric_value(row: Row, metric: str) -> float | None:
    """Return the number at path `metric` of a row: keys joined by / (a key may have one itself). None if missing."""
    value = row.get(metric)
    if isinstance(value, int | float):
        return float(value)
    for name, inner in row.items():
        if isinstance(inner, Mapping) and metric.startswith(f"{name}/"):
            found = metric_value(inner, metric.removeprefix(f"{name}/"))
            if found is not None:
                return found
    return None


def check_metric(row: Row, metric: str) -> None:
    """Raise ValueError where an evaluation lacks this metric."""
    if metric_value(row, metric) is None:
        known = sorted(_metrics(row))
        raise ValueError(
            f"eval.metric = {metric!r}: the evaluation has no such figure. There are {', '.join(known)}"
            f"{did_you_mean(metric, known)}"
        )


def best_of(rows: Sequence[Row], metric: str) -> Row | None:
    """Return the first row with the largest value of `metric`; None where no row has it."""
    best, most = None, -math.inf
    for row in rows:
        value = metric_value(row, metric)
        if value is not None and value > most:
            best, most = row, value
    return best


def early_stop_reason(rows: Sequence[Row], config: EvalConfig) -> str:
    """Return why training ends early by eval.patience; "" where it continues.

    An evaluation is an improvement if it exceeds the last improvement by more than eval.min_improvement; one without
    the metric is none.
    """
    if not config.patience:
        return ""
    step, most, worse = 0, -math.inf, 0
    for row in rows:
        value = metric_value(row, config.metric)
        if value is not None and (most == -math.inf or value > most + config.min_improvement):
            step, most, worse = row["step"], value, 0
        else:
            worse += 1
    if worse < config.patience:
        return ""
    return (
        f"{worse} evaluations in a row were no better than that after step {step} ({config.metric} {most:.4g};"
        f" eval.patience = {config.patience})"
    )


def _metrics(row: Row, path: str = "") -> list[str]:
    """Return the paths of the numbers by which evaluations can be compared."""
    found = [
        path + name
        for name, value in row.items()
        if (name == "mean" or name.startswith(("pass@", "maj@"))) and isinstance(value, int | float)
    ]
    for name in ("settings", "sources", "data_sources", "roles"):
        for key, inner in (row.get(name) or {}).items():
            found += _metrics(inner, f"{path}{name}/{key}/")
    return found
