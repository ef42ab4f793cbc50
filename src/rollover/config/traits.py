"""The names of advantage estimators, policy losses and aggregations, and what each declares about itself.

Owns all that is known of them by name; the functions behind them are in rollover.algorithms, which imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
]


@dataclass(frozen=True)
class AdvantageTraits:
    """Declarations of an advantage estimator, for rules and callers."""

    about: str
    """How it makes an advantage. {divided}: as algorithm.advantage_std, or passk_std, says."""
    reads: tuple[str, ...] = ("rewards_N", "group_N")
    """The arguments that are about the rollouts, by the names of `ScoredBatch` in algorithms/advantage.py."""
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
    what the rules ask for, and the function is called by trainer/token_advantages.py."""
    statistics: bool = False
    """It reads statistics of the policy's distribution at each token (`TrainerBackend.compute_statistics`)."""
    critic: bool = False
    """A critic makes the advantages; there is no function of this name per rollout."""
    never_negative: bool = False
    """No advantage is below 0."""
    no_kl_in_reward: str = ""
    """Why its rewards cannot have the KL to a reference in them; "": they can."""

    @property
    def compares_siblings(self) -> bool:
        """Whether a rollout needs others of its task, so that a group of equal rewards teaches nothing."""
        return "group_N" in self.reads

    @property
    def greedy(self) -> bool:
        """Whether it compares with a greedy rollout of the task."""
        return "greedy_rewards_N" in self.reads


_SEVERAL = ("rewards_NR", "group_N", "weights_R")
_NO_KL = "its advantages are of several rewards, of which the KL is none"
# Each is the function of that name in algorithms/advantage.py; those over tokens: trainer/token_advantages.py.
ADVANTAGES = {
    "grpo": AdvantageTraits("the reward less the mean of those compared{divided}", options={"std": "advantage_std"}),
    "dr_grpo": AdvantageTraits("the reward less the mean of those compared"),
    "rloo": AdvantageTraits("the reward less the mean of the others'"),
    "gpg": AdvantageTraits(
        "the reward less the mean of those compared, times the step's rollouts for each whose reward is not 0",
        over_the_batch=True
    ),
    "gdpo": AdvantageTraits(
        "each reward by itself less its mean in the group{divided}, summed by algorithm.reward_weights, and"
        " normalised over the whole step",
        _SEVERAL, {"std": "advantage_std"}, counts="rollouts", over_the_batch=True, no_kl_in_reward=_NO_KL
    ),
    "sum_then_normalize": AdvantageTraits(
        "the sum of the rewards by algorithm.reward_weights, less the mean of those compared{divided}",
        _SEVERAL, {"std": "advantage_std"}, no_kl_in_reward=_NO_KL
    ),
    "remax": AdvantageTraits(
        "the reward less that of the greedy answer to the same task", ("rewards_N", "greedy_rewards_N")
    ),
    "reinforce_plus_plus": AdvantageTraits(
        "the reward less the mean of the whole step, divided by its standard deviation",
        ("rewards_N",), counts="tokens", over_the_batch=True
    ),
    "reinforce_plus_plus_baseline": AdvantageTraits(
        "the reward less the mean of those compared, then normalised over the whole step",
        counts="tokens", over_the_batch=True
    ),
    "opo": AdvantageTraits(
        "the reward less the mean of those compared, in which each counts by its length",
        ("rewards_N", "group_N", "lengths_N")
    ),
    "grpo_passk": AdvantageTraits(
        "what the answer adds to the best of algorithm.passk siblings, on average{divided}",
        options={"k": "passk", "std": "passk_std"}, never_negative=True
    ),
    "max_rl": AdvantageTraits(
        "the reward less the mean of those compared, divided by that mean (where one is below 0: by how far"
        " the mean is above the least)",
        no_kl_in_reward="it divides by the mean reward of a group, which the KL may make negative"
    ),
    "precomputed": AdvantageTraits(
        "it came with the rollout, from its producer or workflow",
        (), precomputed=True, no_kl_in_reward="advantages come with the trajectories, and no reward is made into one"
    ),
    "gae": AdvantageTraits(
        "by token: how much better it went on than the critic expected (generalised advantage estimation)",
        ("rewards_N",), {"gamma": "gamma"}, over_the_batch=True, over_tokens=True, critic=True
    ),
    "reinforce_plus_plus_tokens": AdvantageTraits(
        "by token: the rewards still to come, normalised over the tokens of the step",
        ("rewards_N",), {"gamma": "gamma"}, over_the_batch=True, over_tokens=True
    ),
    "optimal_token_baseline": AdvantageTraits(
        "by token: the reward less the baseline of least variance at its place",
        over_the_batch=True, over_tokens=True, statistics=True
    ),
    "tir_optimal_token_baseline": AdvantageTraits(
        "by token: the reward less the baseline of least variance at its place in the loss",
        over_the_batch=True, over_tokens=True, statistics=True
    ),
}  # fmt: skip


def estimator(name: str) -> AdvantageTraits:
    """Return the traits of an estimator. Custom functions read rewards and groups."""
    return ADVANTAGES.get(name) or AdvantageTraits("a custom function")


def with_estimator(like: Callable[[AdvantageTraits], bool]) -> tuple[str, ...]:
    """Return the condition of an option: algorithm.advantage is an estimator of whose traits `like` holds."""
    return ("algorithm.advantage", *(name for name, traits in ADVANTAGES.items() if like(traits)))


@dataclass(frozen=True)
class LossTraits:
    """Declarations of a policy loss, for rules and the trainer. Tests check each loss against them."""

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


# Each is the function of that name in algorithms/loss.py.
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
