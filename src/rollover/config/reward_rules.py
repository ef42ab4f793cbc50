"""Rules over more than one option of which one is in [rewards]: see `rules`."""

from __future__ import annotations

import sys

from rollover.config.rule import Inert, Refused

_OF_THE_POOL = ("num_workers", "memory_gb", "retries", "quarantine_after")

INERT: tuple[Inert, ...] = (
    Inert(
        tuple(f"rewards.{name}" for name in _OF_THE_POOL),
        ("run.replay_rollouts",),
        lambda c: bool(c.run.replay_rollouts),
        "with run.replay_rollouts: recorded rollouts have their rewards",
    ),
)

REFUSED: tuple[Refused, ...] = (
    Refused(
        ("rewards.memory_gb",),
        lambda c: c.rewards.memory_gb > 0 and sys.platform != "linux",
        lambda c: (
            f"rewards.memory_gb = {c.rewards.memory_gb:g}: only Linux limits the memory of a process so. Set it to 0"
        ),
    ),
    Refused(
        ("rewards.memory_gb",),
        lambda c: 0 < c.rewards.memory_gb < 0.1,
        lambda c: (
            f"rewards.memory_gb = {c.rewards.memory_gb:g}: a worker needs some 0.03 of it for itself. Set it to 0.1 or"
            " more, or to 0 (no limit)"
        ),
    ),
)
