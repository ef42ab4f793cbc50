"""Numbers as short JSON: seven significant digits are more than any curve shows, and half of what a float64 takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

_EXACT = 2.0**53


def number(value: float | None) -> float | int | None:
    """Whole numbers are whole; None for what is missing or not finite."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < _EXACT:
        return int(value)
    return float(f"{value:.7g}")


def numbers(values: Iterable[float | None]) -> list[float | int | None]:
    """`number` of each."""
    return [number(value) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]


def times(values: np.ndarray, resolution: float) -> list[float]:
    """Seconds, as exactly as an axis of this resolution (in seconds) shows them, and ten times that."""
    digits = min(6, max(0, 1 - math.floor(math.log10(resolution)))) if resolution > 0 else 6
    return np.round(values, digits).tolist()


def columns_of(array: np.ndarray, names: Iterable[str]) -> dict[str, list[Any]]:
    """Fields of a structured array, each as a list."""
    return {name: array[name].tolist() for name in names}
