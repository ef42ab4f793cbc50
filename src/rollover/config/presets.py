"""Named sets of [algorithm] values. They lie below every file: a file or an override replaces single values.

Owns which published recipe is which values. Never holds a formula (algorithms/ does) or a value of another table.
A preset names every value that makes the recipe, also where it equals the default, so it keeps its meaning.
"""

from __future__ import annotations

from typing import Any

_OFF_POLICY = {
    # Not in any of the three papers, which train on their own fresh samples: rollouts that roll over to a later step
    # hold tokens of older versions, so each token is weighted by proximal/behavior, truncated (Decoupled PPO,
    # arXiv 2505.24298; TIS).
    "correction": "token_truncate",
    "correction_cap": 2.0,
}

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, DeepSeekMath, arXiv 2402.03300: rewards normalised by mean and standard deviation of the group,
    # symmetric clip. Two deliberate differences: losses are averaged over the tokens of the batch as in DAPO (the
    # paper averages within each answer first, "seq-mean-token-mean", which favours short right and long wrong
    # answers), and there is no KL term.
    "grpo": {
        "advantage": "grpo",
        "advantage_std": "sample",
        "loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token-mean",
        **_OFF_POLICY,
    },
    # Yu et al. 2025, DAPO, arXiv 2503.14476: clip-higher (0.2 / 0.28) and token-level loss. Its dynamic sampling and
    # overlong shaping are no part of [algorithm].
    "dapo": {
        "advantage": "grpo",
        "advantage_std": "sample",
        "loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "token-mean",
        **_OFF_POLICY,
    },
    # Liu et al. 2025, Dr. GRPO, arXiv 2503.20783: no division by the standard deviation, and sums over tokens divided
    # by a constant (rollout.max_new_tokens) in place of each answer's length.
    "dr_grpo": {
        "advantage": "dr_grpo",
        "loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "seq-mean-token-sum-norm",
        **_OFF_POLICY,
    },
}
