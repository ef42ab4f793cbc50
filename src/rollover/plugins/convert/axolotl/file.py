"""Reads an Axolotl YAML: whether it is one, and its options by dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollover.plugins.convert.verl.config import flat

_ONLY_THERE = ("base_model", "trl", "rl", "micro_batch_size", "adapter")


def is_axolotl(tables: Mapping[str, Any]) -> bool:
    """Whether the tables of a YAML are Axolotl's."""
    return any(name in tables for name in _ONLY_THERE)


def options_of_axolotl(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are set (`key:` alone sets none), nested ones as `trl.beta`. ValueError for what is no training
    by rollouts."""
    kind = tables.get("rl")
    if kind not in ("grpo", "gdpo"):
        raise ValueError(f"rl: {kind} trains on no rollouts of the policy; rl: grpo and rl: gdpo can be converted")
    return {name: value for name, value in flat(tables, whole="kwargs").items() if value is not None}
