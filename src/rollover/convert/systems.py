"""The systems whose configurations can be converted."""

from __future__ import annotations

from rollover.convert.axolotl import AXOLOTL
from rollover.convert.lightrft import LIGHTRFT
from rollover.convert.mapping import System
from rollover.convert.trl import TRL
from rollover.convert.verl import VERL

SYSTEMS: dict[str, System] = {"verl": VERL, "trl": TRL, "axolotl": AXOLOTL, "lightrft": LIGHTRFT}
