"""`rollover.plan`: the result of `rollover plan` as an object."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollover.api.settings import Arguments, Layer
from rollover.sim.plan import Plan, plan_config


def plan(
    *,
    config: Layer | Sequence[Layer] | None = None,
    from_run: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Plan:
    """Predict speed, idleness, staleness and waste of a configuration by simulating it (docs/planning.md).

    `config`, `model` and `overrides` as in `rollover.train`; [plan] has the assumed speeds and lengths. `from_run`: a
    run's directory, whose lengths and speeds are taken in their place. ConfigError for a wrong key, ValueError for a
    run without records. The plan has `figures`, `synchronous`, `speedup`, `variants` and `best`; `as_json()` is a dict.
    """
    settings = Arguments(model=model, config=config, overrides=overrides).settle(require_sources=False)
    try:
        return plan_config(settings.resolved, None if from_run is None else Path(from_run)).plan
    finally:
        settings.release()
