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
    """[algorithm]: advantages, loss and off-policy correction. A preset sets them below every file."""

    preset: Presets = option("grpo", "Named set of the values below.")

    advantage: str = option(
        "grpo",
        f"Advantage estimator: {', '.join(ADVANTAGES)}, or your own function (module:function or"
        " path.py:function) of rewards [N] and group ids [N] to advantages [N].",
        entry_points="advantages",
    )
    advantage_std: Literal["sample", "population", "batch", "none"] = option(
        "sample",
        "Standard deviation that advantages are divided by.",
        only_if=_WITH_STD,
    )
    advantage_counts: Literal["", "rollouts", "tokens"] = option(
        "",
        "What statistics over the batch count once: rollouts, or loss tokens. Empty: as the estimator's paper (gdpo"
        " rollouts, reinforce_plus_plus and its baseline variant tokens).",
        only_if=_WITH_COUNTS,
    )
    passk: int = option(2, "k of the pass@k that is optimised.", ge=2, only_if=_WITH_K)
    passk_std: Literal["none", "sample"] = option(
        "none", "Standard deviation of the group that advantages of pass@k are divided by.", only_if=_WITH_K
    )
    reward_weights: dict[str, Any] = option(
        {},
        "Weight of each reward, by name: score, or another entry of what the"
        " reward function returned. Empty: score alone.",
        only_if=_WITH_SEVERAL,
    )
    gamma: float = option(1.0, "Discount of a token.", gt=0, le=1, only_if=_WITH_GAMMA)
    gae_lambda: float = option(1.0, "Decay of the temporal differences.", ge=0, le=1, only_if=_WITH_CRITIC)

    after_scoring: str = option(
        "",
        "Your own function (module:function or path.py:function) of the batch's rollouts and their"
        " advantages [N], which it may change in place or replace by returning others.",
        entry_points="after_scoring",
    )

    loss: str = option(
        "clip",
        f"Policy loss: {', '.join(LOSSES)}, or your own function (module:function or path.py:function),"
        " called as those of algorithms/loss.py are.",
        entry_points="losses",
    )
    clip_low: float = option(
        0.2,
        "Lower clip of the current/proximal ratio: 1 - clip_low (other losses bound something else).",
        ge=0,
        only_if=_BOUNDED,
    )
    clip_high: float = option(
        0.2,
        "Upper clip of the current/proximal ratio: 1 + clip_high (other losses bound something else).",
        gt=0,
        only_if=_BOUNDED,
    )
    dual_clip: float = option(
        0.0, "Bound of the ratio where the advantage is negative (3, say); 0 = off.", ge=0, only_if=_DUAL_CLIPPED
    )
    loss_options: dict[str, Any] = option({}, "Further options of the loss, by name (docs/algorithms.md).")
    aggregation: Aggregation = option("token-mean", "How per-token losses become one number.")
    aggregation_norm: float = option(
        0.0,
        "What seq-mean-token-sum-norm divides by; 0 = rollout.max_new_tokens.",
        ge=0,
        only_if=("algorithm.aggregation", "seq-mean-token-sum-norm"),
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus; 0 = off.", ge=0)
    top_entropy_share: float = option(
        1.0,
        "The share of a minibatch's tokens whose policy loss counts: those of highest entropy at the start of the step;"
        " 1 = all.",
        gt=0,
        le=1,
    )

    proximal: Literal["step_start", "behavior", "interpolated", "snapshot"] = option(
        "step_start",
        "Proximal log-probs, which the current ones are clipped against. step_start: under the weights at"
        " the start of the step. behavior: those the engine sampled with. interpolated: between behavior and"
        " current, by staleness, without a forward pass. snapshot: under the kept weights of the version that sampled"
        " the token. Not with loss = reinforce, which has no ratio to clip.",
    )
    correction: Correction = option(
        "token_truncate",
        "Importance weight proximal/behavior (current/behavior with loss = reinforce) on every token:"
        " truncated at, or masked above, correction_cap; of the token, the sequence, or a sequence's part of one policy"
        " version.",
    )
    correction_cap: float = option(2.0, "Cap of the importance weight.", gt=1)
    correction_normalize: bool = option(
        False,
        "Divide the importance weights by their mean over the step's tokens (sequences, with sequence_truncate and"
        " sequence_mask), at the weights of its start.",
    )
    correction_floor: Annotated[float, Field(ge=0, lt=1)] = option(
        0.0, "Floor of the importance weight; 0 = none.", unless=_WEIGHING
    )
    allow_uncorrected: bool = option(
        False,
        "Permit stale rollouts, truncated sampling, or several updates a step though the loss has no"
        " ratio to the policy that sampled, or though that is not known of your own loss.",
    )
    rejection: dict[str, Any] = option(
        {},
        "Leave tokens or sequences out of the step, as if they were context, by estimates (k1, k2, k3) of how far the"
        " policy at its start is from the one that sampled: the largest that is kept, by name, { sequence_mean_k3 ="
        " 0.01, token_k1 = [-0.1, 0.2] } for instance (of k1 also the lowest). All have to hold.",
    )
    off_policy_mask_above: float = option(
        math.inf,
        "Leave out sequences with a negative advantage whose mean log behavior/current is above this; inf = off.",
        ge=0,
        unlimited=True,
    )
    ess_step_scaling: bool = option(
        False, "Scale the learning rate by the effective sample size of the importance weights."
    )

    kl_coef: float = option(0.0, "Weight of the KL to the reference policy; 0 = off.", ge=0)
    kl_in: Literal["loss", "reward", "both"] = option(
        "loss",
        "loss: added to the loss of every token. reward: taken off the rewards, before algorithm.advantage; of the"
        " policy at the start of the step. both: kl_coef and kl_kind are those of the loss, kl_reward_coef and"
        " kl_reward_kind those of the reward.",
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
        "Estimator of that KL; with +: its value, and the gradient of k2. k1 in the loss with kl_bias_correction only:"
        " its gradient is 0 on average. Empty: k3 in the loss, k1 in the reward.",
        only_if=_WITH_KL,
    )
    kl_max: float = option(
        0.0, "Bound of a token's k3 from above, beyond which it has no gradient (verl: 10); 0 = none.", ge=0,
        only_if=_WITH_KL, unless=("algorithm.kl_bias_correction", True),
    )  # fmt: skip
    kl_bias_correction: bool = option(
        False,
        "Multiply that KL by the current/behavior ratio, which makes its gradient unbiased.",
        only_if=[_WITH_KL, ("algorithm.kl_in", "loss", "both")],
    )
    kl_target: float = option(
        0.0,
        "Mean KL of a token that the coefficient of the KL in the reward is steered to, from its value on (Ziegler et"
        " al. 2019); 0 = it is fixed.",
        ge=0,
        only_if=[_WITH_KL, ("algorithm.kl_in", "reward", "both")],
    )
    kl_horizon: int = option(
        10_000,
        "Rollouts in which a KL at 1.2 times kl_target, or above, raises the coefficient by a fifth.",
        ge=1,
        only_if=("algorithm.kl_target",),
    )
    reference_path: str = option(
        "",
        "The model whose weights are the reference (as model.path), of the policy's architecture and vocabulary."
        " Empty: the weights that the run begins with.",
        only_if=_WITH_KL,
    )
    reference_refresh_steps: int = option(
        0, "Steps after which the reference takes the policy's weights in, every time; 0 = never.", ge=0,
        only_if=_WITH_KL,
    )  # fmt: skip
    reference_mixup: float = option(
        1.0,
        "Share of the policy's weights in the refreshed reference; the rest is what it was (TR-DPO: 0.6).",
        gt=0,
        le=1,
        only_if=("algorithm.reference_refresh_steps",),
    )

    @model_validator(mode="wrap")
    @classmethod
    def _with_preset(cls, given: Any, make: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """The values given, above those of the preset, which do not count as set (`model_fields_set`). load_config lays
        one over the other by itself."""
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
        """The importance weight proximal/behavior that multiplies the loss of a token, wherever that is done; none
        where it is 1."""
        if self.proximal_policy == "behavior" or self.supervised:
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
