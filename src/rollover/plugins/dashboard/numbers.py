"""Numbers: as short JSON, in arrays, and in the place of words.

Seven significant digits are more than any curve shows, and half of what a float64 takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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


def structured(rows: Sequence[tuple[Any, ...]], dtype: np.dtype[Any]) -> np.ndarray:
    """An array of these rows of numbers, which as floats are all exact."""
    names = dtype.names or ()
    values = np.array(rows, np.float64).reshape(-1, len(names))  # as floats first: it takes a third of the time
    found = np.zeros(len(values), dtype)
    for place, name in enumerate(names):
        found[name] = values[:, place]
    return found


class WordIndex(list[str]):
    """Words, each once, that numbers stand for: their places."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[str, int] = {}

    def number(self, word: str) -> int:
        """The place of a word, which is added where it is new."""
        place = self._places.setdefault(word, len(self))
        if place == len(self):
            self.append(word)
        return place


def columns_of(array: np.ndarray, names: Iterable[str]) -> dict[str, list[Any]]:
    """Fields of a structured array, each as a list."""
    return {name: array[name].tolist() for name in names}
