"""`from rollover.compat.trl import GRPOConfig, GRPOTrainer`: the public name of the TRL plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollover.plugins.trl import __all__ as __all__
from rollover.plugins.trl import __getattr__ as __getattr__

if TYPE_CHECKING:
    from rollover.plugins.trl import GRPOConfig as GRPOConfig
    from rollover.plugins.trl import GRPOTrainer as GRPOTrainer
