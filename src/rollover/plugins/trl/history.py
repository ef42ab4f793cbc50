"""A run's rows by TRL's names: `trainer.state.log_history`, and what `evaluate` returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# TRL's name -> ours
_NAMES = {
    "loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate", "reward": "reward/mean",
    "reward_std": "reward/std", "frac_reward_zero_std": "groups/zero_variance", "entropy": "entropy",
    "kl": "kl/reference", "clip_ratio/region_mean": "clip_fraction", "completions/mean_length": "length/mean",
    "completions/max_length": "length/max", "completions/clipped_ratio": "length/truncated",
    "num_tokens": "tokens/generated", "step_time": "time/step_s",
}  # fmt: skip
_LAST = ("num_tokens", "learning_rate")


def of_steps(rows: Sequence[Mapping[str, Any]], rewards: Sequence[str]) -> dict[str, Any]:
    """One entry of log_history: means over the steps that it is of. rewards: names of the reward functions."""
    names = dict(_NAMES)
    if len(rewards) == 1:
        names[f"rewards/{rewards[0]}/mean"] = "reward/mean"
    names |= {f"rewards/{name}/mean": f"reward/extra/{name}" for name in rewards if len(rewards) > 1}
    known = set(names.values())
    names |= {
        key.removeprefix("reward/extra/"): key for row in rows for key in row
        if key.startswith("reward/extra/") and key not in known
    }  # fmt: skip
    entry: dict[str, Any] = {}
    for theirs, ours in names.items():
        found = [row[ours] for row in rows if isinstance(row.get(ours), int | float) and math.isfinite(row[ours])]
        if found:
            entry[theirs] = found[-1] if theirs in _LAST else sum(found) / len(found)
    return entry


def of_evaluation(row: Mapping[str, Any], prefix: str = "eval") -> dict[str, Any]:
    """An evaluation: its numbers, of which the mean score is `eval_reward`."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
    return {f"{prefix}_{'reward' if name == 'mean' else name}": value for name, value in numbers.items()}
