"""The names of advantage estimators and policy losses, and what each declares about itself.

Owns the names; the functions behind them are in rollover.algorithms, which imports torch.
"""

from dataclasses import dataclass

# trainer/batch.py has the function of each, which config may not import (it needs torch); a test compares them.
ADVANTAGES = (
    "grpo", "dr_grpo", "rloo", "gdpo", "sum_then_normalize", "remax", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "opo", "grpo_passk", "max_rl", "gae",
)  # fmt: skip
OVER_THE_BATCH = ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")  # not over the group alone
WITHOUT_SIBLINGS = ("remax", "reinforce_plus_plus", "gae")  # advantages that need no second rollout of a task


@dataclass(frozen=True)
class LossTraits:
    """What a policy loss declares about itself, for the rules and the trainer. Tests hold each loss to it."""

    ratio: bool | None = True
    """It holds the current/proximal ratio; None: not known."""
    weighs: bool = False
    """It multiplies by proximal/behavior itself."""
    bounds: bool = True
    """It reads clip_low and clip_high."""
    dual_clip: bool = False
    """It reads dual_clip."""
    vanishes: bool = True
    """A token whose advantage is 0 adds nothing to the gradient."""
    by_row: bool = False
    """All tokens of a row hold the loss of the row, which is weighed as a whole."""


# Each is the function of that name in algorithms/loss.py.
LOSSES = {
    "clip": LossTraits(dual_clip=True),
    "reinforce": LossTraits(ratio=False, bounds=False),
    "gspo": LossTraits(),
    "gmpo": LossTraits(by_row=True),
    "cispo": LossTraits(),
    "sapo": LossTraits(bounds=False),
    "luspo": LossTraits(),
    "clip_cov": LossTraits(vanishes=False),
    "kl_cov": LossTraits(bounds=False, vanishes=False),
    "dppo_tv": LossTraits(),
    "dppo_kl": LossTraits(),
    "decoupled": LossTraits(weighs=True, dual_clip=True),
}
OWN_LOSS = LossTraits(ratio=None, dual_clip=True, vanishes=False)  # of a function of the user's nothing is assumed
