"""The KL to a reference policy: what [algorithm] says of it, where it enters and by which estimator, and the rules."""

from typing import Any, Literal

from rollover.config.table import Inert, Refused, Rule
from rollover.config.traits import estimator


def default_kl_kind(kl_in: object) -> Literal["k1", "k3"]:
    """Return the estimator where algorithm.kl_kind says none."""
    return "k1" if kl_in == "reward" else "k3"


class ReferencePolicy:
    """Properties of the reference policy: a part of the table [algorithm]."""

    @property
    def needs_reference(self: Any) -> bool:
        """Whether log-probs of the reference policy are asked for."""
        return self.kl_coef > 0

    @property
    def own_reference(self: Any) -> bool:
        """Whether its weights are, or become, others than the initial ones."""
        return self.needs_reference and bool(self.reference_path or self.reference_refresh_steps)

    @property
    def kl_in_loss(self: Any) -> bool:
        return self.needs_reference and self.kl_in != "reward"

    @property
    def kl_in_reward(self: Any) -> bool:
        return self.needs_reference and self.kl_in != "loss"

    @property
    def kl_estimator(self: Any) -> str:
        """`kl_kind`, or what it stands for when it is empty."""
        return self.kl_kind or default_kl_kind(self.kl_in)

    @property
    def reward_kl_coef(self: Any) -> float:
        """The coefficient of the KL in the reward."""
        return self.kl_reward_coef if self.kl_in == "both" else self.kl_coef

    @property
    def reward_kl_estimator(self: Any) -> str:
        """The estimator of the KL in the reward."""
        return self.kl_reward_kind if self.kl_in == "both" else self.kl_estimator

    def kl_bound(self: Any, kind: str) -> float | None:
        """Return the bound of a token's KL by the estimator `kind`; None where it has none."""
        return (self.kl_max or None) if kind.removesuffix("+") == "k3" else None

    @property
    def kl_estimators(self: Any) -> set[str]:
        """Every estimator in use."""
        return {self.kl_estimator} | ({self.kl_reward_kind} if self.kl_in == "both" else set())


def _in_reward(config: Any) -> bool:
    return config.algorithm.kl_in_reward


def _without_reward(config: Any) -> str:
    """Return an estimator of [algorithm] or a role whose rewards cannot hold the KL; "" if there is none."""
    used = config.workflow.advantages(config.algorithm.advantage)
    return next((name for name in used if estimator(name).no_kl_in_reward), "")


def _is_k1_in_loss(config: Any) -> bool:
    algorithm = config.algorithm
    return algorithm.kl_in_loss and algorithm.kl_kind == "k1" and not algorithm.kl_bias_correction


RULES: tuple[Rule, ...] = (
    Inert(
        ("algorithm.kl_max",),
        ("algorithm.kl_kind", "algorithm.kl_in", "algorithm.kl_coef"),
        lambda c: "k3" not in {kind.removesuffix("+") for kind in c.algorithm.kl_estimators},
        "unless algorithm.kl_kind is k3 or k3+: it bounds that estimate alone",
    ),
    Refused(
        ("algorithm.kl_kind", "algorithm.kl_coef", "algorithm.kl_in"),
        _is_k1_in_loss,
        'algorithm.kl_kind = "k1" in the loss: the gradient of that estimate is 0 on average. Set'
        ' algorithm.kl_kind = "k3", "k2" or "k1+" (its value, with the gradient of k2),'
        ' algorithm.kl_bias_correction = true, or algorithm.kl_in = "reward"',
    ),
    Refused(
        ("algorithm.kl_reward_coef", "algorithm.kl_in"),
        lambda c: _in_reward(c) and c.algorithm.reward_kl_coef == 0,
        'algorithm.kl_in = "both" with algorithm.kl_reward_coef = 0: there is no KL in the reward. Set'
        ' algorithm.kl_reward_coef, or algorithm.kl_in = "loss"',
    ),
    Refused(
        ("algorithm.kl_kind", "algorithm.kl_in"),
        lambda c: _in_reward(c) and c.algorithm.reward_kl_estimator.endswith("+"),
        lambda c: (
            f'algorithm.kl_kind = "{c.algorithm.kl_kind}" with algorithm.kl_in = "reward": the + is about a gradient,'
            f' and a reward has none. Set algorithm.kl_kind = "{c.algorithm.kl_kind.removesuffix("+")}"'
        ),
    ),
    Refused(
        ("algorithm.kl_bias_correction", "algorithm.kl_kind"),
        lambda c: c.algorithm.kl_bias_correction and c.algorithm.kl_estimator not in ("k1", "k3"),
        lambda c: (
            f'algorithm.kl_bias_correction with algorithm.kl_kind = "{c.algorithm.kl_kind}": only k1 and k3 have a'
            ' bias-corrected form. Set algorithm.kl_kind = "k3"'
        ),
    ),
    Refused(
        ("algorithm.kl_in", "algorithm.advantage", "workflow.roles"),
        lambda c: _in_reward(c) and bool(_without_reward(c)),
        lambda c: (
            f'algorithm.kl_in = "{c.algorithm.kl_in}" with the advantage "{_without_reward(c)}":'
            f' {estimator(_without_reward(c)).no_kl_in_reward}. Set algorithm.kl_in = "loss"'
        ),
    ),
    Refused(
        ("algorithm.kl_in", "distill.mix", "distill.teacher", "distill.roles"),
        lambda c: _in_reward(c) and c.distill.replaces,
        lambda c: (
            f'algorithm.kl_in = "{c.algorithm.kl_in}" with distill.mix = "replace": the advantages are the'
            " teacher's, and rewards have no part in them. Set"
            ' algorithm.kl_in = "loss", or distill.mix = "add"'
        ),
    ),
    Refused(
        ("algorithm.kl_in", "replay.size"),
        lambda c: _in_reward(c) and c.replay.size > 0,
        lambda c: (
            f'replay.size with algorithm.kl_in = "{c.algorithm.kl_in}": the KL gives every group a signal, so that none'
            ' is replaced. Remove replay.size, or set algorithm.kl_in = "loss"'
        ),
    ),
    Refused(
        ("algorithm.kl_in", "train.streaming_min_groups"),
        lambda c: _in_reward(c) and c.train.streaming_min_groups > 0,
        lambda c: (
            f'train.streaming_min_groups with algorithm.kl_in = "{c.algorithm.kl_in}": the KL is taken of the whole'
            ' step before its first gradient. Set train.streaming_min_groups = 0, or algorithm.kl_in = "loss"'
        ),
    ),
    Refused(
        ("algorithm.reference_path", "model.lora.rank"),
        lambda c: c.model.lora.rank > 0 and c.algorithm.reference_path not in ("", c.model.path),
        lambda c: (
            f'algorithm.reference_path = "{c.algorithm.reference_path}" with model.lora.rank = {c.model.lora.rank}: the'
            " reference is computed by the model that carries the adapters. Set it to model.path, which is the model"
            " without them, or train all weights (model.lora.rank = 0)"
        ),
    ),
    Refused(
        ("algorithm.reference_path", "algorithm.reference_refresh_steps", "model.lora.rank"),
        lambda c: (
            c.model.lora.rank > 0 and bool(c.algorithm.reference_path) and c.algorithm.reference_refresh_steps > 0
        ),
        "algorithm.reference_refresh_steps with algorithm.reference_path and adapters: the model without adapters"
        " cannot take any. Remove algorithm.reference_path",
    ),
    Refused(
        ("algorithm.reference_mixup", "algorithm.reference_refresh_steps", "model.lora.rank"),
        lambda c: c.model.lora.rank > 0 and c.algorithm.reference_refresh_steps > 0 and c.algorithm.reference_mixup < 1,
        lambda c: (
            f"algorithm.reference_mixup = {c.algorithm.reference_mixup:g} with model.lora.rank ="
            f" {c.model.lora.rank}: mixed factors of two adapters are not the mixture of the weights that they make."
            " Set algorithm.reference_mixup = 1"
        ),
    ),
    Refused(
        ("distill.teacher", "algorithm.reference_path", "algorithm.reference_refresh_steps"),
        lambda c: c.distill.teacher == "initial" and c.algorithm.own_reference,
        'distill.teacher = "initial" with a reference of other weights (algorithm.reference_path,'
        " algorithm.reference_refresh_steps): one copy of weights is kept for both. Set distill.teacher to the path"
        " of the model, or leave the reference at the initial weights",
    ),
)
