"""`from rollover.compat.trl import GRPOConfig, GRPOTrainer`, in the place of trl's own (docs/coming-from.md)."""

from __future__ import annotations

from rollover.compat.trl.config import GRPOConfig
from rollover.compat.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
