from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationInfo, model_validator

from rollover.config.base import UNSETTLED, Table
from rollover.config.presets import PRESETS

# Names of rollover.algorithms, which config may not import (it needs torch); a test compares them.
ADVANTAGES = (
    "grpo", "dr_grpo", "rloo", "gdpo", "sum_then_normalize", "remax", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "opo", "grpo_passk", "max_rl", "gae",
)  # fmt: skip
OVER_THE_BATCH = ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")  # not over the group alone
WITHOUT_SIBLINGS = ("remax", "reinforce_plus_plus", "gae")  # advantages that need no second rollout of a task


@dataclass(frozen=True)
class LossTraits:
    """What a policy loss declares about itself, for the rules and the trainer. Tests hold each loss to it.

    ratio: it holds the current/proximal ratio; None: not known. weighs: it multiplies by proximal/behavior itself.
    bounds, dual_clip: it reads clip_low and clip_high, dual_clip. vanishes: a token whose advantage is 0 adds nothing
    to the gradient. by_row: all tokens of a row hold the loss of the row, which is weighed as a whole.
    """

    ratio: bool | None = True
    weighs: bool = False
    bounds: bool = True
    dual_clip: bool = False
    vanishes: bool = True
    by_row: bool = False


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
_OWN = LossTraits(ratio=None, dual_clip=True, vanishes=False)  # of a function of the user's nothing is assumed

Presets = Literal[
    "grpo", "dapo", "dr_grpo", "gspo", "cispo", "gmpo", "rloo", "reinforce++", "gdpo", "ppo", "remax", "max_rl",
    "async_decoupled",
]  # fmt: skip
Correction = Literal[
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop", "segment_truncate",
    "segment_mask",
]  # fmt: skip
Rejection = Literal[
    "none", "token_k1", "token_k2", "token_k3", "sequence_sum_k1", "sequence_sum_k2", "sequence_sum_k3",
    "sequence_mean_k1", "sequence_mean_k2", "sequence_mean_k3", "sequence_max_k1", "sequence_max_k2",
    "sequence_max_k3",
]  # fmt: skip


class AlgorithmConfig(Table):
    """[algorithm]: advantages, loss and off-policy correction. A preset sets them below every file."""

    preset: Presets = Field(default="grpo", description="Named set of the values below.")

    advantage: str = Field(
        default="grpo",
        description=f"Advantage estimator: {', '.join(ADVANTAGES)}, or your own function (module:function or"
        " path.py:function) of rewards [N] and group ids [N] to advantages [N].",
    )
    advantage_std: Literal["sample", "population", "batch", "none"] = Field(
        default="sample", description="grpo, sum_then_normalize: standard deviation that advantages are divided by."
    )
    passk: int = Field(default=2, ge=2, description="grpo_passk: k of the pass@k that is optimised.")
    reward_weights: dict[str, Any] = Field(
        default_factory=dict,
        description="gdpo, sum_then_normalize: weight of each reward, by name: score, or another entry of what the"
        " reward function returned. Empty: score alone.",
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="gae: discount of a token.")
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="gae: decay of the temporal differences.")
    critic_learning_rate: float = Field(default=1e-3, gt=0, description="gae: learning rate of the value head.")
    value_clip: float = Field(default=0.2, gt=0, description="gae: clip of the change of a value in one step.")

    after_scoring: str = Field(
        default="",
        description="Your own function (module:function or path.py:function) of the batch's rollouts and their"
        " advantages [N], which it may change in place or replace by returning others.",
    )

    loss: str = Field(
        default="clip",
        description=f"Policy loss: {', '.join(LOSSES)}, or your own function (module:function or path.py:function),"
        " called as those of algorithms/loss.py are.",
    )
    clip_low: float = Field(
        default=0.2, ge=0, description="Lower clip of the current/proximal ratio: 1 - clip_low (of some losses, else)."
    )
    clip_high: float = Field(
        default=0.2, gt=0, description="Upper clip of the current/proximal ratio: 1 + clip_high (of some losses, else)."
    )
    dual_clip: float = Field(
        default=0.0, ge=0, description="clip: bound of the ratio where the advantage is negative (3, say); 0 = off."
    )
    loss_options: dict[str, Any] = Field(
        default_factory=dict, description="Further options of the loss, by name (docs/algorithms.md)."
    )
    aggregation: Literal[
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
        "prompt-mean",
    ] = Field(default="token-mean", description="How per-token losses become one number.")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus; 0 = off.")

    proximal: Literal["step_start", "behavior", "interpolated", "snapshot"] = Field(
        default="step_start",
        description="Proximal log-probs, which the current ones are clipped against. step_start: under the weights at"
        " the start of the step. behavior: those the engine sampled with. interpolated: between behavior and"
        " current, by staleness, without a forward pass. snapshot: under the kept weights of the version that sampled"
        " the token. Not with loss = reinforce, which has no ratio to clip.",
    )
    correction: Correction = Field(
        default="token_truncate",
        description="Importance weight proximal/behavior (current/behavior with loss = reinforce) on every token:"
        " truncated at, or masked above, correction_cap; of the token, the sequence, or a sequence's part of one policy"
        " version.",
    )
    correction_cap: float = Field(default=2.0, gt=1, description="Cap of the importance weight.")
    correction_floor: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Floor of the importance weight; 0 = none."
    )
    allow_uncorrected: bool = Field(
        default=False,
        description="Permit stale rollouts, truncated sampling, or several minibatches a step though the loss has no"
        " ratio to the policy that sampled, or though that is not known of your own loss.",
    )
    rejection: Rejection = Field(
        default="none",
        description="Leave tokens or sequences out of the step, as if they were context, by an estimate (k1, k2, k3) of"
        " the divergence of proximal and behavior policy.",
    )
    rejection_high: float = Field(default=0.1, gt=0, description="rejection: the largest divergence that is kept.")
    off_policy_mask_threshold: float = Field(
        default=0.0,
        ge=0,
        description="Leave out sequences with a negative advantage whose mean log behavior/current is above it; 0 ="
        " off.",
    )
    ess_step_scaling: bool = Field(
        default=False, description="Scale the learning rate by the effective sample size of the importance weights."
    )

    kl_coef: float = Field(
        default=0.0, ge=0, description="Weight of the KL to the initial weights, in the loss; 0 = off."
    )
    kl_kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = Field(
        default="k3",
        description="Estimator of that KL; with +: its value, and the gradient of k2. k1 with kl_bias_correction only:"
        " its gradient is 0 on average.",
    )
    kl_bias_correction: bool = Field(
        default=False, description="Multiply that KL by the current/behavior ratio, which makes its gradient unbiased."
    )

    @model_validator(mode="wrap")
    @classmethod
    def _with_preset(cls, given: Any, make: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """The values given, above those of the preset, which do not count as set (`model_fields_set`). load_config lays
        one over the other by itself."""
        if info.context is UNSETTLED or not isinstance(given, dict):
            return make(given)
        name = given.get("preset", cls.model_fields["preset"].default)
        made = make({**(PRESETS.get(name, {}) if isinstance(name, str) else {}), **given})
        made.model_fields_set.intersection_update(given)
        return made

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> "AlgorithmConfig":
        """ValueError for what load_config refuses, as far as it lies in this table alone."""
        if info.context is not UNSETTLED:
            from rollover.config.checks import refuse_algorithm  # here, as rules are about the whole Config

            refuse_algorithm(self)
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether the initial weights are kept, for the KL to them."""
        return self.kl_coef > 0

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def compares_siblings(self) -> bool:
        """Whether a group of equal rewards teaches nothing."""
        return self.advantage not in WITHOUT_SIBLINGS

    # What the loss does. Rules, derived values and the trainer all ask here.

    @property
    def loss_traits(self) -> LossTraits:
        return LOSSES.get(self.loss, _OWN)

    @property
    def needs_every_token(self) -> bool:
        """Whether tokens with advantage 0 change the gradient, too."""
        return bool(self.kl_coef or self.entropy_coef or self.needs_critic) or not self.loss_traits.vanishes

    @property
    def proximal_policy(self) -> Literal["current", "step_start", "behavior", "interpolated", "snapshot"]:
        """The policy between current and behavior. A loss without a ratio has none: its importance weight is
        current/behavior."""
        return "current" if self.loss_traits.ratio is False else self.proximal

    @property
    def weight(self) -> Correction:
        """The importance weight proximal/behavior that multiplies the loss of a token, wherever that is done; none
        where it is 1."""
        if self.proximal_policy == "behavior":
            return "none"
        return "token_truncate" if self.loss_traits.weighs else self.correction

    @property
    def weight_outside(self) -> Correction:
        """`weight`, unless the loss multiplies by it itself."""
        return "none" if self.loss_traits.weighs else self.weight

    @property
    def corrects(self) -> bool:
        """Whether the loss holds the ratio to the policy that sampled a token, as far as is known.

        It is the product of the loss' own ratio, current/proximal, and the weight, proximal/behavior. Where the loss
        may lack the first, the second has to hold all: the proximal policy must be (nearly) the current one.
        """
        if self.loss_traits.ratio is None:
            return self.weight != "none" and self.proximal_policy == "step_start"
        return self.weight != "none" or self.proximal_policy == "behavior"

    @property
    def follows_updates(self) -> bool:
        """Whether the loss holds the ratio of the current policy to that at the start of the step, as far as is known:
        it matters from the second minibatch of a step on. A loss without one may have current/behavior as a weight."""
        return self.loss_traits.ratio is True or (self.proximal_policy == "current" and self.weight != "none")
