"""How long a run takes for a step, of late. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_LATEST = 20  # steps


def seconds_a_step(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean time of its latest steps, evaluations and checkpoints in them; None where no row has times."""
    times = [row["time/step_s"] for row in rows[-_LATEST:] if row.get("time/step_s")]
    return sum(times) / len(times) if times else None
