"""[critic]: what estimates the value of a prefix for algorithm.advantage = "gae", and how it learns; and its rules."""

from typing import Literal

from rollover.config.table import Inert, Refused, Rule, Table, option
from rollover.config.traits import with_estimator

POLICY: Literal["policy"] = "policy"


class CriticConfig(Table):
    """[critic]: the values of PPO, learned on the policy's minibatches."""

    only_if = with_estimator(lambda traits: traits.critic)

    model: str = option(
        "",
        "Empty: a linear value head on the policy's own hidden states, which it does not change. policy: a model of its"
        " own, which begins with the weights of model.path. Or another model (as model.path), with the policy's"
        " vocabulary.",
    )
    learning_rate: float = option(
        1e-5, "Peak learning rate of AdamW for the weights of a model of its own.", gt=0, only_if=("critic.model",)
    )
    head_learning_rate: float = option(1e-3, "Peak learning rate of AdamW for the value head, which begins at 0.", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = option("constant", "Learning rates after warm-up.")
    warmup_steps: int = option(0, "Optimizer steps of linear warm-up.", ge=0)
    min_lr_ratio: float = option(
        0.0,
        "Final learning rates as a share of the peak.",
        ge=0,
        le=1,
        only_if=("critic.schedule", "linear", "cosine"),
    )
    weight_decay: float = option(0.0, "AdamW weight decay (matrices only).", ge=0)
    max_grad_norm: float = option(1.0, "Clip the norm of the gradient of head and model together; 0 = off.", ge=0)
    value_clip: float = option(0.2, "Clip of the change of a value in one step; 0 = the plain squared error.", ge=0)
    policy_waits_steps: int = option(
        0, "Training steps at the start in which the critic alone learns, and the policy waits.", ge=0
    )
    bootstrap_truncated: bool = option(
        False,
        "An answer that was cut at the token limit goes on for the critic: the value after its last token counts as"
        " what would have come. Off: nothing comes after it.",
    )


RULES: tuple[Rule, ...] = (
    Inert(
        ("critic.bootstrap_truncated",),
        ("filters.mask_truncated",),
        lambda c: c.filters.mask_truncated,
        "with filters.mask_truncated: truncated answers are out of the loss",
    ),
    Refused(
        ("critic.policy_waits_steps", "train.num_steps"),
        lambda c: c.algorithm.needs_critic and 0 < c.train.num_steps <= c.critic.policy_waits_steps,
        lambda c: (
            f"critic.policy_waits_steps = {c.critic.policy_waits_steps} with train.num_steps = {c.train.num_steps}: the"
            " policy would never be trained. Lower the first, or raise the second"
        ),
    ),
)
