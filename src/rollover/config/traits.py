"""The names of advantage estimators, policy losses and aggregations, and what each declares about itself.

Owns the names; the functions behind them are in rollover.algorithms, which imports torch.
"""

from dataclasses import dataclass, field
from typing import Literal

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
]


@dataclass(frozen=True)
class AdvantageTraits:
    """What an advantage estimator declares about itself, for the rules and for who calls it."""

    reads: tuple[str, ...] = ("rewards_N", "group_N")
    """The arguments that are about the rollouts, by the names of `Scored` in algorithms/estimator.py."""
    options: dict[str, str] = field(default_factory=dict)
    """The other arguments: name -> the option of [algorithm] that it is the value of."""
    counts: Literal["rollouts", "tokens"] | None = None
    """What its statistics over the batch count once, unless algorithm.advantage_counts says otherwise; None: it has
    none that may count either."""
    over_the_batch: bool = False
    """An advantage depends on all groups of the step, and not on its own group alone."""
    precomputed: bool = False
    """Advantages come with the trajectories; there is no function of this name."""
    over_tokens: bool = False
    """Advantages are estimated per token in the training step, of rewards per token; `reads` and `options` are then
    what the rules ask for, and the function is called by trainer/token_estimates.py."""
    statistics: bool = False
    """It reads statistics of the policy's distribution at each token (`TrainerBackend.compute_statistics`)."""
    critic: bool = False
    """A critic makes the advantages; there is no function of this name per rollout."""

    @property
    def compares_siblings(self) -> bool:
        """Whether a rollout needs others of its task, so that a group of equal rewards teaches nothing."""
        return "group_N" in self.reads


_SEVERAL = ("rewards_NR", "group_N", "weights_R")
# Each is the function of that name in algorithms/advantage.py; those over tokens: trainer/token_estimates.py.
ADVANTAGES = {
    "grpo": AdvantageTraits(options={"std": "advantage_std"}),
    "dr_grpo": AdvantageTraits(),
    "rloo": AdvantageTraits(),
    "gpg": AdvantageTraits(over_the_batch=True),
    "gdpo": AdvantageTraits(_SEVERAL, {"std": "advantage_std"}, counts="rollouts", over_the_batch=True),
    "sum_then_normalize": AdvantageTraits(_SEVERAL, {"std": "advantage_std"}),
    "remax": AdvantageTraits(("rewards_N", "greedy_rewards_N")),
    "reinforce_plus_plus": AdvantageTraits(("rewards_N",), counts="tokens", over_the_batch=True),
    "reinforce_plus_plus_baseline": AdvantageTraits(counts="tokens", over_the_batch=True),
    "opo": AdvantageTraits(("rewards_N", "group_N", "lengths_N")),
    "grpo_passk": AdvantageTraits(options={"k": "passk", "std": "passk_std"}),
    "max_rl": AdvantageTraits(),
    "precomputed": AdvantageTraits((), precomputed=True),
    "gae": AdvantageTraits(("rewards_N",), {"gamma": "gamma"}, over_the_batch=True, over_tokens=True, critic=True),
    "reinforce_plus_plus_tokens": AdvantageTraits(
        ("rewards_N",), {"gamma": "gamma"}, over_the_batch=True, over_tokens=True
    ),
    "optimal_token_baseline": AdvantageTraits(over_the_batch=True, over_tokens=True, statistics=True),
    "tir_optimal_token_baseline": AdvantageTraits(over_the_batch=True, over_tokens=True, statistics=True),
}
OWN_ADVANTAGE = AdvantageTraits()  # a function of the user's own is called with rewards and groups


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
    by_ratio: bool = True
    """Where the current/proximal ratio is 1, its gradient is that of reinforce."""
    by_row: bool = False
    """All tokens of a row hold the loss of the row, which is weighed as a whole."""
    supervised: bool = False
    """Its tokens are those of examples: no policy sampled them, and they have no advantage."""


# Each is the function of that name in algorithms/loss.py or algorithms/unclipped.py.
LOSSES = {
    "clip": LossTraits(dual_clip=True),
    "reinforce": LossTraits(ratio=False, bounds=False),
    "importance_sampling": LossTraits(bounds=False),
    "gspo": LossTraits(),
    "gmpo": LossTraits(by_row=True),
    "cispo": LossTraits(),
    "sapo": LossTraits(bounds=False),
    "luspo": LossTraits(),
    "vespo": LossTraits(weighs=True, bounds=False, by_ratio=False),
    "dro": LossTraits(bounds=False, vanishes=False),
    "clip_cov": LossTraits(vanishes=False, by_ratio=False),
    "kl_cov": LossTraits(bounds=False, vanishes=False),
    "dppo_tv": LossTraits(),
    "dppo_kl": LossTraits(),
    "decoupled": LossTraits(weighs=True, dual_clip=True, by_ratio=False),
    "nll": LossTraits(ratio=False, bounds=False, vanishes=False, by_ratio=False, supervised=True),
}
OWN_LOSS = LossTraits(
    ratio=None, dual_clip=True, vanishes=False, by_ratio=False
)  # of a function of the user's nothing is assumed
