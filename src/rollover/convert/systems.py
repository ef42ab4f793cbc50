"""The systems whose configurations can be converted."""

from __future__ import annotations

from rollover.convert.axolotl.rows import AXOLOTL
from rollover.convert.lightrft.rows import LIGHTRFT
from rollover.convert.mapping import System
from rollover.convert.trl.rows import TRL
from rollover.convert.verl.rows import VERL

SYSTEMS: dict[str, System] = {"verl": VERL, "trl": TRL, "axolotl": AXOLOTL, "lightrft": LIGHTRFT}
