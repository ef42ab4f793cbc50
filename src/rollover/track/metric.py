"""What a metric key declares about itself: its unit, and how the values of several steps become one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["mean", "sum", "max", "last", "counter", "rate"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One key of `metrics.jsonl`.

    `kind` says how the rows of several steps become one: mean, sum, max, the last one (gauges), the last one of a
    counter that grows over the whole run, or, for a rate, sum of `numerator` / sum of `denominator` (both keys of
    METRICS).
    """

    key: str
    kind: Kind
    unit: str
    doc: str
    numerator: str = ""
    denominator: str = ""
