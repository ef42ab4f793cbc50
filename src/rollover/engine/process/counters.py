"""Counters of an engine whose process may be started again: of all its processes together."""

from __future__ import annotations

_GAUGES = ("kv/bytes", "engine/kernels")  # of the present process alone


class Counters:
    """Sums what the processes counted, each of which began at 0."""

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._before: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Whether any process has told anything."""
        return bool(self._now or self._before)

    def set(self, stats: dict[str, float]) -> None:
        """What the present process has counted so far."""
        self._now = stats

    def on_death(self) -> None:
        """The present process has ended: the next one counts from 0."""
        self._before, self._now = self.total(), {}

    def total(self) -> dict[str, float]:
        before = {key: value for key, value in self._before.items() if key not in _GAUGES}
        return {key: self._now.get(key, 0.0) + before.get(key, 0.0) for key in self._before | self._now}
