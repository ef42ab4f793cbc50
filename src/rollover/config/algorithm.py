"""[algorithm], and the rules about it; those about off-policy correction are in correction.py."""

import math
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationInfo, model_validator

from rollover.config import correction, estimators, reference
from rollover.config.correction import Correction
from rollover.config.presets import PRESETS
from rollover.config.table import (
    OWN,
    UNSETTLED,
    Refused,
    Rule,
    Table,
    alone,
    given,
    on_fields,
    option,
    refuse,
)
from rollover.config.traits import ADVANTAGES, LOSSES, OWN_LOSS, Aggregation, LossTraits, with_estimator

Presets = Literal[
    "grpo", "dapo", "dr_grpo", "gspo", "cispo", "gmpo", "sapo", "luspo", "vespo", "rloo", "opo", "gpg", "reinforce++",
    "gdpo", "ppo", "remax", "max_rl", "async_decoupled", "sft",
]  # fmt: skip

_WITH_STD = with_estimator(lambda traits: "advantage_std" in traits.options.values())
_WITH_K = with_estimator(lambda traits: "passk" in traits.options.values())
_WITH_COUNTS = with_estimator(lambda traits: traits.counts is not None)
_WITH_SEVERAL = with_estimator(lambda traits: "weights_R" in traits.reads)
_WITH_GAMMA = with_estimator(lambda traits: "gamma" in traits.options)
_WITH_CRITIC = with_estimator(lambda traits: traits.critic)
_BOUNDED = ("algorithm.loss", *(name for name, traits in LOSSES.items() if traits.bounds), OWN)
_DUAL_CLIPPED = ("algorithm.loss", *(name for name, traits in LOSSES.items() if traits.dual_clip), OWN)
_WITH_KL = ("algorithm.kl_coef",)
_IN_BOTH = ("algorithm.kl_in", "both")
_WEIGHING = ("algorithm.loss", *(name for name, traits in LOSSES.items() if traits.weighs))


class AlgorithmConfig(estimators.Estimation, reference.ReferencePolicy, Table):
    """[algorithm]: advantages, loss and off-policy correction. A preset gives defaults below all files."""

    preset: Presets = option("grpo", "Named set of the values below.")

    advantage: str = option(
        "grpo",
        f"Advantage estimator: {', '.join(ADVANTAGES)}, or a custom function (module:function or"
        " path.py:function) from rewards [N] and group ids [N] to advantages [N].",
        entry_points="advantages",
    )
    advantage_std: Literal["sample", "population", "batch", "none"] = option(
        "sample",
        "Standard deviation that divides the advantages.",
        only_if=_WITH_STD,
    )
    advantage_counts: Literal["", "rollouts", "tokens"] = option(
        "",
        "Unit of statistics over the batch: rollouts, or loss tokens. Empty: as in the estimator's paper (gdpo:"
        " rollouts; reinforce_plus_plus and its baseline variant: tokens).",
        only_if=_WITH_COUNTS,
    )
    passk: int = option(2, "k of the optimized pass@k.", ge=2, only_if=_WITH_K)
    passk_std: Literal["none", "sample"] = option(
        "none", "Standard deviation of the group that divides advantages of pass@k.", only_if=_WITH_K
    )
    reward_weights: dict[str, Any] = option(
        {},
        "Weights of the rewards, by name: score, or another entry of the reward function's result. Empty: score alone.",
        only_if=_WITH_SEVERAL,
    )
    gamma: float = option(1.0, "Discount per token.", gt=0, le=1, only_if=_WITH_GAMMA)
    gae_lambda: float = option(1.0, "Lambda of generalized advantage estimation.", ge=0, le=1, only_if=_WITH_CRITIC)

    after_scoring: str = option(
        "",
        "Custom function (module:function or path.py:function) of the batch's rollouts and their advantages [N]. It"
        " changes the advantages in place, or returns new ones.",
        entry_points="after_scoring",
    )

    loss: str = option(
        "clip",
        f"Policy loss: {', '.join(LOSSES)}, or a custom function (module:function or path.py:function),"
        " called as those of algorithms/loss.py are.",
        entry_points="losses",
    )
    clip_low: float = option(
        0.2,
        "Lower clip of the current/proximal ratio: 1 - clip_low. Some losses bound another quantity"
        " (docs/algorithms.md).",
        ge=0,
        only_if=_BOUNDED,
    )
    clip_high: float = option(
        0.2,
        "Upper clip of the current/proximal ratio: 1 + clip_high. Some losses bound another quantity"
        " (docs/algorithms.md).",
        gt=0,
        only_if=_BOUNDED,
    )
    dual_clip: float = option(
        0.0, "Bound of the ratio where the advantage is negative, for example 3; 0 = off.", ge=0, only_if=_DUAL_CLIPPED
    )
    loss_options: dict[str, Any] = option({}, "Further options of the loss, by name (docs/algorithms.md).")
    aggregation: Aggregation = option("token-mean", "Reduction of per-token losses to a scalar.")
    aggregation_norm: float = option(
        0.0,
        "Divisor of seq-mean-token-sum-norm; 0 = rollout.max_new_tokens.",
        ge=0,
        only_if=("algorithm.aggregation", "seq-mean-token-sum-norm"),
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus; 0 = off.", ge=0)
    top_entropy_share: float = option(
        1.0,
        "Share of a minibatch's tokens that enter the policy loss: those of highest entropy at the start of the"
        " step; 1 = all.",
        gt=0,
        le=1,
    )

    proximal: Literal["step_start", "behavior", "interpolated", "snapshot"] = option(
        "step_start",
        "Policy of the proximal log-probs in the clipped ratio. step_start: the weights at the start of the step."
        " behavior: the policy that sampled. interpolated: between behavior and current, by staleness, without a"
        " forward pass. snapshot: the stored weights of the version that sampled the token. No effect with loss ="
        " reinforce, which has no ratio.",
    )
    correction: Correction = option(
        "token_truncate",
        "Importance weight proximal/behavior (current/behavior with loss = reinforce), truncated at or masked above"
        " correction_cap; per token, per sequence, or per segment of one policy version.",
    )
    correction_cap: float = option(2.0, "Cap of the importance weight.", gt=1)
    correction_normalize: bool = option(
        False,
        "Divide the importance weights by their mean over the step's tokens (sequence_truncate and sequence_mask:"
        " over its sequences), computed under the weights at the start of the step.",
    )
    correction_floor: Annotated[float, Field(ge=0, lt=1)] = option(
        0.0, "Floor of the importance weight; 0 = none.", unless=_WEIGHING
    )
    allow_uncorrected: bool = option(
        False,
        "Allow stale rollouts, truncated sampling, or several updates per step although the loss has no ratio to the"
        " sampling policy, or a custom loss does not declare one.",
    )
    rejection: dict[str, Any] = option(
        {},
        "Mask tokens or sequences by estimates (k1, k2, k3) of the divergence between the policy at the start of the"
        " step and the sampling policy: upper bounds by name, for example { sequence_mean_k3 = 0.01, token_k1 ="
        " [-0.1, 0.2] } (k1 may have a lower bound). All bounds apply.",
    )
    off_policy_mask_above: float = option(
        math.inf,
        "Mask sequences with a negative advantage whose mean log(behavior/current) is above this; inf = off.",
        ge=0,
        unlimited=True,
    )
    ess_step_scaling: bool = option(
        False, "Scale the learning rate by the effective sample size of the importance weights."
    )

    kl_coef: float = option(0.0, "Weight of the KL to the reference policy; 0 = off.", ge=0)
    kl_in: Literal["loss", "reward", "both"] = option(
        "loss",
        "loss: add the KL to the loss of every token. reward: subtract it from the rewards before the advantages,"
        " under the policy at the start of the step. both: kl_coef and kl_kind apply to the loss, kl_reward_coef and"
        " kl_reward_kind to the reward.",
        only_if=_WITH_KL,
    )
    kl_reward_coef: float = option(
        0.0, "Weight of the KL in the reward with kl_in = both.", ge=0, only_if=[_WITH_KL, _IN_BOTH]
    )
    kl_reward_kind: Literal["k1", "abs", "k2", "k3"] = option(
        "k1", "Estimator of the KL in the reward with kl_in = both.", only_if=[_WITH_KL, _IN_BOTH]
    )
    kl_kind: Literal["", "k1", "abs", "k2", "k3", "k1+", "k3+"] = option(
        "",
        "Estimator of the KL; with +: its value, with the gradient of k2. k1 in the loss needs kl_bias_correction,"
        " as its expected gradient is 0. Empty: k3 in the loss, k1 in the reward.",
        only_if=_WITH_KL,
    )
    kl_max: float = option(
        0.0, "Upper bound of a token's k3, without a gradient beyond it (verl: 10); 0 = none.", ge=0,
        only_if=_WITH_KL, unless=("algorithm.kl_bias_correction", True),
    )  # fmt: skip
    kl_bias_correction: bool = option(
        False,
        "Multiply the KL by the current/behavior ratio, which makes its gradient unbiased.",
        only_if=[_WITH_KL, ("algorithm.kl_in", "loss", "both")],
    )
    kl_target: float = option(
        0.0,
        "Target of the mean KL per token. An adaptive controller changes the coefficient of the KL in the reward,"
        " starting from its configured value (Ziegler et al. 2019); 0 = fixed coefficient.",
        ge=0,
        only_if=[_WITH_KL, ("algorithm.kl_in", "reward", "both")],
    )
    kl_horizon: int = option(
        10_000,
        "Horizon of the adaptive controller: number of rollouts in which a KL of at least 1.2 times kl_target raises"
        " the coefficient by a fifth.",
        ge=1,
        only_if=("algorithm.kl_target",),
    )
    reference_path: str = option(
        "",
        "Reference model (as model.path), with the policy's architecture and vocabulary. Empty: the initial weights"
        " of the run.",
        only_if=_WITH_KL,
    )
    reference_refresh_steps: int = option(
        0, "Steps between updates of the reference from the policy; 0 = never.", ge=0,
        only_if=_WITH_KL,
    )  # fmt: skip
    reference_mixup: float = option(
        1.0,
        "Share of the policy's weights in an updated reference (TR-DPO: 0.6).",
        gt=0,
        le=1,
        only_if=("algorithm.reference_refresh_steps",),
    )

    @model_validator(mode="wrap")
    @classmethod
    def _with_preset(cls, given: Any, make: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Validate the given values over those of the preset, which do not count as set (`model_fields_set`).

        load_config merges the two by itself.
        """
        if info.context is UNSETTLED or not isinstance(given, dict):
            return make(given)
        name = given.get("preset", cls.model_fields["preset"].default)
        values = {**(PRESETS.get(name, {}) if isinstance(name, str) else {}), **given}
        if not values.get("kl_kind"):
            values["kl_kind"] = reference.default_kl_kind(values.get("kl_in"))
        made = make(values)
        made.model_fields_set.intersection_update(given)
        return made

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> "AlgorithmConfig":
        """ValueError for what load_config refuses, as far as it lies in this table alone."""
        if info.context is not UNSETTLED:
            refuse(SimpleNamespace(algorithm=self), _ALONE, set(given(self, "algorithm.")))
        return self

    def neutral(self, name: str) -> tuple[Any, ...]:
        return ("", reference.default_kl_kind(self.kl_in)) if name == "kl_kind" else super().neutral(name)

    # What the loss does. Rules, derived values and the trainer all ask here.

    @property
    def loss_traits(self) -> LossTraits:
        return LOSSES.get(self.loss, OWN_LOSS)

    @property
    def supervised(self) -> bool:
        """Whether the run trains on examples ([sft]) in the place of rollouts."""
        return self.loss_traits.supervised

    @property
    def needs_every_token(self) -> bool:
        """Whether tokens with advantage 0 change the gradient, too."""
        return bool(self.kl_in_loss or self.entropy_coef or self.needs_critic) or not self.loss_traits.vanishes

    @property
    def proximal_policy(self) -> Literal["current", "step_start", "behavior", "interpolated", "snapshot"]:
        """The policy between current and behavior. A loss without a ratio has none: its importance weight is
        current/behavior."""
        return "current" if self.loss_traits.ratio is False else self.proximal

    @property
    def weight(self) -> Correction:
        """The importance weight proximal/behavior of a token's loss, whether the objective or the loss function
        multiplies by it; "none" where it is always 1."""
        if self.proximal_policy == "behavior" or self.supervised:
            return "none"
        return "token_truncate" if self.loss_traits.weighs else self.correction

    @property
    def compares_versions(self) -> bool:
        """Whether training tells the policies of a rollout's tokens apart by their versions."""
        return self.proximal_policy == "snapshot" or self.weight.startswith("segment_")

    @property
    def weight_outside(self) -> Correction:
        """`weight`, unless the loss multiplies by it itself."""
        return "none" if self.loss_traits.weighs else self.weight

    @property
    def corrects(self) -> bool:
        """Whether the loss holds the ratio to the policy that sampled a token, as far as is known.

        It is the product of the loss' own ratio, current/proximal, and the weight, proximal/behavior. Where the loss
        may lack the first, the second has to hold all: the proximal policy must be (nearly) the current one. Examples
        need none of it.
        """
        if self.supervised:
            return True
        if self.loss_traits.ratio is None:
            return self.weight != "none" and self.proximal_policy == "step_start"
        return self.weight != "none" or self.proximal_policy == "behavior"

    @property
    def follows_updates(self) -> bool:
        """Whether the loss holds the ratio of the current policy to that at the start of the step, as far as is known:
        it matters from the second update of a step on. A loss without one may have current/behavior as a weight, and
        that of examples needs neither."""
        if self.supervised:
            return True
        return self.loss_traits.ratio is True or (self.proximal_policy == "current" and self.weight != "none")


_BOUNDS_AS_SHARES = ("clip", "decoupled", "gspo", "luspo", "cispo", "clip_cov", "dppo_tv")  # of a ratio or probability
_NOT_FREE = {
    "clip_low": "algorithm.clip_low",
    "clip_high": "algorithm.clip_high",
    "dual_clip": "algorithm.dual_clip",
    "weight_cap": "algorithm.correction_cap",
}


RULES: tuple[Rule, ...] = (
    *correction.RULES,
    *estimators.RULES,
    *reference.RULES,
    Refused(
        ("algorithm.dual_clip",),
        lambda c: 0 < c.algorithm.dual_clip <= 1,
        lambda c: (
            f"algorithm.dual_clip = {c.algorithm.dual_clip:g}: it bounds the ratio where the advantage is negative, on"
            " policy too unless it is above 1. Set it to 3, say, or to 0 (off)"
        ),
    ),
    Refused(
        ("algorithm.clip_low", "algorithm.loss"),
        lambda c: c.algorithm.clip_low > 1 and c.algorithm.loss in _BOUNDS_AS_SHARES,
        lambda c: (
            f'algorithm.clip_low = {c.algorithm.clip_low:g} with algorithm.loss = "{c.algorithm.loss}": nothing falls'
            " by more than 1. Set it to 1 (no bound) or less"
        ),
    ),
    Refused(
        ("algorithm.clip_high", "algorithm.loss"),
        lambda c: c.algorithm.clip_high > 1 and c.algorithm.loss == "dppo_tv",
        lambda c: (
            f'algorithm.clip_high = {c.algorithm.clip_high:g} with algorithm.loss = "dppo_tv": a probability never'
            " rises by more than 1. Set it to 1 (no bound) or less"
        ),
    ),
    Refused(
        ("algorithm.loss_options",),
        lambda c: any(name.endswith("_BT") for name in c.algorithm.loss_options),
        lambda c: "\n".join(
            f"algorithm.loss_options.{name}: names that end in _BT are streams of numbers per token, which the trainer"
            " gives to the loss. Remove it from algorithm.loss_options"
            for name in c.algorithm.loss_options
            if name.endswith("_BT")
        ),
    ),
    Refused(
        ("algorithm.loss_options",),
        lambda c: any(name in _NOT_FREE for name in c.algorithm.loss_options),
        lambda c: "\n".join(
            f"algorithm.loss_options.{name} is set by {_NOT_FREE[name]}. Remove it from algorithm.loss_options"
            for name in c.algorithm.loss_options
            if name in _NOT_FREE
        ),
    ),
)
_ALONE = alone("algorithm", [*on_fields(AlgorithmConfig, "algorithm"), *RULES])
