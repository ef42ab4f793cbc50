"""Which figures of a run left their range, and when: what track/health.py says, from rows. Pure but for `Warned`, which
keeps what it has said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rollover.config import Config
from rollover.config.schema import renamed
from rollover.plugins.dashboard.columns import Columns
from rollover.track.health import RANGES, Health, passed_over


class HealthWarning(NamedTuple):
    """`key` of metrics.jsonl was out of its range at `step`; `text` says how, and what to try."""

    step: int
    key: str
    text: str


def warnings_of(rows: Iterable[Mapping[str, Any]], config: Mapping[str, Any]) -> list[HealthWarning]:
    """What a run with these rows was told, in order. `config`: its config.resolved.json, or {}; that of an older
    version counts as far as it can be read."""
    return list(_told(_health_of(config), rows))


class Warned:
    """`warnings_of` the columns of a run that grows, whose rows are looked at once each."""

    def __init__(self) -> None:
        self._begin({}, -1)

    def of(self, columns: Columns, config: Mapping[str, Any]) -> list[HealthWarning]:
        """What was said up to now. From the beginning where rows went away, or under another configuration."""
        if (config, columns.cuts) != (self._config, self._cuts):
            self._begin(config, columns.cuts)
        self._found += _told(self._health, columns.rows([wanted.key for wanted in RANGES], self._looked_at))
        self._looked_at = len(columns)
        return list(self._found)

    def _begin(self, config: Mapping[str, Any], cuts: int) -> None:
        self._config, self._cuts = config, cuts
        self._health, self._looked_at = _health_of(config), 0
        self._found: list[HealthWarning] = []


def _health_of(config: Mapping[str, Any]) -> Health:
    try:
        return Health(passed_over(Config.model_validate(renamed(config)))) if config else Health()
    except ValueError:  # a key that is gone, say
        return Health()


def _told(health: Health, rows: Iterable[Mapping[str, Any]]) -> Iterator[HealthWarning]:
    for row in rows:
        for text in health.look({key: value for key, value in row.items() if value is not None}):
            yield HealthWarning(int(row["step"]), text.partition(" = ")[0], text)
