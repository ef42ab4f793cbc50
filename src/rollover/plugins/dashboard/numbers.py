"""Numbers as short JSON, as arrays, and as codes of words.

Seven significant digits exceed the resolution of any curve, and take half the space of a float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

_EXACT = 2.0**53


def number(value: float | None) -> float | int | None:
    """Return whole numbers as int; None for missing and non-finite values."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < _EXACT:
        return int(value)
    return float(f"{value:.7g}")


def numbers(values: Iterable[float | None]) -> list[float | int | None]:
    """Apply `number` to each value."""
    return [number(value) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]


def times(values: np.ndarray, resolution: float) -> list[float]:
    """Round seconds to a tenth of the axis's resolution (in seconds)."""
    digits = min(6, max(0, 1 - math.floor(math.log10(resolution)))) if resolution > 0 else 6
    return np.round(values, digits).tolist()


def structured(rows: Sequence[tuple[Any, ...]], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array of these rows of numbers, which must be exact as floats."""
    names = dtype.names or ()
    values = np.array(rows, np.float64).reshape(-1, len(names))  # via floats: a third of the time
    found = np.zeros(len(values), dtype)
    for place, name in enumerate(names):
        found[name] = values[:, place]
    return found


class WordIndex(list[str]):
    """Distinct words; a word's code is its index."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[str, int] = {}

    def number(self, word: str) -> int:
        """Return the code of a word, adding a new one."""
        place = self._places.setdefault(word, len(self))
        if place == len(self):
            self.append(word)
        return place


def columns_of(array: np.ndarray, names: Iterable[str]) -> dict[str, list[Any]]:
    """Return fields of a structured array as lists."""
    return {name: array[name].tolist() for name in names}
