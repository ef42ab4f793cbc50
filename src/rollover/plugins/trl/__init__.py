"""`from rollover.compat.trl import GRPOConfig, GRPOTrainer`, instead of trl's (docs/coming-from.md).

Names load at first use, so that reward workers do not load the trainer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollover.plugins.trl.config import GRPOConfig
    from rollover.plugins.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]

_PLACES = {"GRPOConfig": "rollover.plugins.trl.config", "GRPOTrainer": "rollover.plugins.trl.trainer"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_PLACES[name]), name)
