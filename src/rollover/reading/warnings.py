"""Which figures of a run left their range, and when: what track/health.py says, from rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rollover.config import Config
from rollover.config.schema import renamed
from rollover.track.health import Health, passed_over


class HealthWarning(NamedTuple):
    """`key` of metrics.jsonl was out of its range at `step`; `text` says how, and what to try."""

    step: int
    key: str
    text: str


def warnings_of(rows: Iterable[Mapping[str, Any]], config: Mapping[str, Any]) -> list[HealthWarning]:
    """What a run with these rows was told, in order. `config`: its config.resolved.json, or {}; that of an older
    version counts as far as it can be read."""
    try:
        health = Health(passed_over(Config.model_validate(renamed(config)))) if config else Health()
    except ValueError:  # a key that is gone, say
        health = Health()
    found = []
    for row in rows:
        for text in health.look({key: value for key, value in row.items() if value is not None}):
            found.append(HealthWarning(row["step"], text.partition(" = ")[0], text))
    return found
