"""Policy losses without a clip: the plain gradient, weights that fall smoothly, and penalties in place of a bound.

As the losses of loss.py, which finds them here by their names.
"""

from __future__ import annotations

import torch

from rollover.algorithms.tokens import LossAndClipped, Tokens


def reinforce(t: Tokens) -> LossAndClipped:
    """-logprob * A (Williams 1992). verl: gpg."""
    return -t.logprobs_BT * t.advantages_BT, torch.zeros_like(t.mask_BT)


def sapo(t: Tokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> LossAndClipped:
    """-A * 4 / tau * sigmoid(tau (r - 1)): a smooth gate instead of a clip. Aggregate: seq-mean-token-mean.

    Gao et al. 2025 (arXiv 2511.20347). tau is tau_positive where A > 0, else tau_negative. At r = 1 the gradient is
    REINFORCE's. Nothing counts as clipped.
    """
    if min(tau_positive, tau_negative) <= 0:
        raise ValueError("tau_positive and tau_negative must be above 0 (the paper: 1.0 and 1.05)")
    tau_BT = torch.where(t.advantages_BT > 0, tau_positive, tau_negative)
    gate_BT = torch.sigmoid(tau_BT * (t.ratio_BT - 1)) * 4 / tau_BT
    return -gate_BT * t.advantages_BT, torch.zeros_like(t.mask_BT)
