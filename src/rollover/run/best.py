"""Which evaluation of a run is the best, and whether there were enough since: read from the rows of eval.jsonl. Pure.

The rows are the only state: a run that goes on from a checkpoint has those up to there, and so knows the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollover.config import EvalConfig
from rollover.suggest import did_you_mean

Row = Mapping[str, Any]


def figure_of(row: Row, metric: str) -> float | None:
    """The number at this place of a row: keys with / between (a key may have one itself). None: there is none."""
    value = row.get(metric)
    if isinstance(value, int | float):
        return float(value)
    for name, inner in row.items():
        if isinstance(inner, Mapping) and metric.startswith(f"{name}/"):
            found = figure_of(inner, metric.removeprefix(f"{name}/"))
            if found is not None:
                return found
    return None


def check_metric(row: Row, metric: str) -> None:
    """ValueError where an evaluation has no such figure: it may be of a source, say, that there is not."""
    if figure_of(row, metric) is None:
        known = sorted(_figures(row))
        raise ValueError(
            f"eval.metric = {metric!r}: the evaluation has no such figure. There are {', '.join(known)}"
            f"{did_you_mean(metric, known)}"
        )


def best_of(rows: Sequence[Row], metric: str) -> Row | None:
    """The row with the largest figure, the first of them; None where none has it."""
    best, most = None, -math.inf
    for row in rows:
        value = figure_of(row, metric)
        if value is not None and value > most:
            best, most = row, value
    return best


def why_enough(rows: Sequence[Row], config: EvalConfig) -> str:
    """Why training ends here by eval.patience; "" where it goes on.

    An evaluation counts as better where it exceeds the best one that did so before by more than eval.min_improvement;
    one without the figure does not.
    """
    if not config.patience:
        return ""
    step, most, worse = 0, -math.inf, 0
    for row in rows:
        value = figure_of(row, config.metric)
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


def _figures(row: Row, place: str = "") -> list[str]:
    """The places of the figures by which evaluations can be compared."""
    found = [
        place + name
        for name, value in row.items()
        if (name == "mean" or name.startswith(("pass@", "maj@"))) and isinstance(value, int | float)
    ]
    for name in ("settings", "sources", "data_sources", "roles"):
        for inner, of in (row.get(name) or {}).items():
            found += _figures(of, f"{place}{name}/{inner}/")
    return found
