"""Named sets of [algorithm] values. They lie below every file: a file or an override replaces single values.

Owns which published recipe is which values. Never holds a formula (algorithms/ does) or a value of another table.
A preset names every value that makes the recipe, also where it equals the default, so it keeps its meaning.
"""

from __future__ import annotations

from typing import Any

_OFF_POLICY = {
    # Not in these papers, which train on fresh samples: rollouts that roll over to a later step hold tokens of older
    # versions, so each token is weighted by proximal/behavior, truncated (Decoupled PPO, arXiv 2505.24298; TIS).
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
    # Yu et al. 2025, DAPO, arXiv 2503.14476: clip-higher (0.2 / 0.28) and token-level loss. Its dynamic sampling is
    # filters.zero_variance, its overlong filtering filters.mask_truncated; its soft overlong punishment is
    # rewards.overlong_buffer_tokens.
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
    # Zheng et al. 2025, GSPO, arXiv 2507.18071: clip of the sequence's mean ratio, with bounds of that size.
    "gspo": {
        "advantage": "grpo",
        "advantage_std": "sample",
        "loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "seq-mean-token-mean",
        **_OFF_POLICY,
    },
    # MiniMax-M1 2025, CISPO, arXiv 2506.13585: the ratio is a clipped constant weight, without a lower bound. The upper
    # one is not in the paper: ratios up to 5, as ScaleRL (arXiv 2510.13786) found to be good.
    "cispo": {
        "advantage": "grpo",
        "advantage_std": "sample",
        "loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "aggregation": "token-mean",
        **_OFF_POLICY,
    },
    # Zhao et al. 2025, GMPO, arXiv 2507.20673: geometric mean of the ratios, clipped at exp(-0.4) and exp(0.4).
    "gmpo": {
        "advantage": "grpo",
        "advantage_std": "sample",
        "loss": "gmpo",
        "clip_low": 0.4,
        "clip_high": 0.4,
        "aggregation": "seq-mean-token-mean",
        **_OFF_POLICY,
    },
    # Gao et al. 2025, SAPO, arXiv 2511.20347: a sigmoid of the token's ratio in the place of the clip, with the paper's
    # temperatures, 1.0 and 1.05.
    "sapo": {
        "advantage": "grpo",
        "advantage_std": "sample",
        "loss": "sapo",
        "aggregation": "seq-mean-token-mean",
        **_OFF_POLICY,
    },
    # LUSPO, arXiv 2602.05261: GSPO, with its bounds, whose sequences count by their length.
    "luspo": {
        "advantage": "grpo",
        "advantage_std": "sample",
        "loss": "luspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "seq-mean-token-sum",
        **_OFF_POLICY,
    },
    # VESPO, arXiv 2602.10693: a soft weight of the sequence in the place of the clip. It holds proximal/behavior
    # itself, with the cap of TRL's vllm_importance_sampling_clip_max.
    "vespo": {
        "advantage": "grpo",
        "advantage_std": "sample",
        "loss": "vespo",
        "correction_cap": 3.0,
        "aggregation": "token-mean",
    },
    # Ahmadian et al. 2024, RLOO, arXiv 2402.14740: REINFORCE of whole answers, the others of the group as baseline. The
    # paper's KL in the reward is left out.
    "rloo": {
        "advantage": "rloo",
        "loss": "reinforce",
        "aggregation": "seq-mean-token-sum",
        **_OFF_POLICY,
    },
    # Hao et al. 2025, OPO, arXiv 2505.23585: REINFORCE of whole answers on policy, the baseline weighted by length.
    "opo": {
        "advantage": "opo",
        "loss": "reinforce",
        "aggregation": "seq-mean-token-sum",
        **_OFF_POLICY,
    },
    # Chu et al. 2025, GPG, arXiv 2504.02546: REINFORCE of tokens with the group's mean as baseline, and a factor that
    # makes up for rollouts without a reward.
    "gpg": {
        "advantage": "gpg",
        "loss": "reinforce",
        "aggregation": "token-mean",
        **_OFF_POLICY,
    },
    # Hu 2025, REINFORCE++, arXiv 2501.03262: normalised over the batch, clip as in PPO. Without the paper's KL.
    "reinforce++": {
        "advantage": "reinforce_plus_plus",
        "loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token-mean",
        **_OFF_POLICY,
    },
    # GDPO: every reward normalised in its group on its own, then the weighted sum over the batch. Name the rewards in
    # algorithm.reward_weights.
    "gdpo": {
        "advantage": "gdpo",
        "loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token-mean",
        **_OFF_POLICY,
    },
    # Schulman et al. 2017, PPO, arXiv 1707.06347, with the values of InstructGPT (arXiv 2203.02155): gamma 1, lambda
    # 0.95. Its critic is [critic]'s, clipped at 0.2 as there; the KL in the reward is left out.
    "ppo": {
        "advantage": "gae",
        "gamma": 1.0,
        "gae_lambda": 0.95,
        "loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token-mean",
        **_OFF_POLICY,
    },
    # Li et al. 2023, ReMax, arXiv 2310.10505: REINFORCE of whole answers, a greedy answer as baseline. Without the
    # paper's KL.
    "remax": {
        "advantage": "remax",
        "loss": "reinforce",
        "aggregation": "seq-mean-token-sum",
        **_OFF_POLICY,
    },
    # MaxRL: (r - mean) / mean, REINFORCE of whole answers: hard tasks weigh more, as in maximum likelihood.
    "max_rl": {
        "advantage": "max_rl",
        "loss": "reinforce",
        "aggregation": "seq-mean-token-sum",
        **_OFF_POLICY,
    },
    # Fu et al. 2025, AReaL, arXiv 2505.24298: the decoupled objective, weights proximal/behavior up to 5 as in its code
    # (which masks those above; here they are truncated).
    "async_decoupled": {
        "advantage": "grpo",
        "advantage_std": "sample",
        "loss": "decoupled",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "correction_cap": 5.0,
        "aggregation": "token-mean",
    },
    # Maximum likelihood of examples ([sft]), the mean over their trained tokens. No policy sampled these: there is
    # nothing to correct.
    "sft": {
        "loss": "nll",
        "aggregation": "token-mean",
        "correction": "none",
    },
}
