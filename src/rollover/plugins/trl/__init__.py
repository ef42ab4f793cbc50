"""`from rollover.compat.trl import GRPOConfig, GRPOTrainer`, in the place of trl's own (docs/coming-from.md).

Names are loaded when they are first used: a worker that is handed a reward function loads no trainer for it.
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
