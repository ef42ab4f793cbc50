"""The systems whose configurations can be converted."""

from __future__ import annotations

from rollover.plugins.convert.axolotl.rows import AXOLOTL
from rollover.plugins.convert.lightrft.rows import LIGHTRFT
from rollover.plugins.convert.mapping import System
from rollover.plugins.convert.trl.rows import TRL
from rollover.plugins.convert.verl.rows import VERL

SYSTEMS: dict[str, System] = {"verl": VERL, "trl": TRL, "axolotl": AXOLOTL, "lightrft": LIGHTRFT}
