"""[critic]: what estimates the value of a prefix for algorithm.advantage = "gae", and how it learns; and its rules."""

from typing import Literal

from rollover.config.table import Inert, Refused, Rule, Table, option
from rollover.config.traits import with_estimator

POLICY: Literal["policy"] = "policy"


class CriticConfig(Table):
    """[critic]: the value function of PPO, trained on the policy's minibatches."""

    only_if = with_estimator(lambda traits: traits.critic)

    model: str = option(
        "",
        "Empty: a linear value head on the policy's hidden states, without a gradient into the policy. policy: a"
        " separate model, initialized from model.path. Or another model (as model.path), with the policy's"
        " vocabulary.",
    )
    learning_rate: float = option(
        1e-5, "Peak learning rate (AdamW) of a separate critic model.", gt=0, only_if=("critic.model",)
    )
    head_learning_rate: float = option(
        1e-3, "Peak learning rate (AdamW) of the value head, which is initialized with 0.", gt=0
    )
    schedule: Literal["constant", "linear", "cosine"] = option("constant", "Learning rate schedule after warm-up.")
    warmup_steps: int = option(0, "Optimizer steps of linear warm-up.", ge=0)
    min_lr_ratio: float = option(
        0.0,
        "Final learning rates as a share of the peak.",
        ge=0,
        le=1,
        only_if=("critic.schedule", "linear", "cosine"),
    )
    weight_decay: float = option(0.0, "AdamW weight decay (matrices only).", ge=0)
    max_grad_norm: float = option(1.0, "Clip the joint gradient norm of head and model; 0 = off.", ge=0)
    value_clip: float = option(0.2, "Clip of the change of a value in one step; 0 = plain squared error.", ge=0)
    policy_waits_steps: int = option(0, "Initial training steps that train only the critic.", ge=0)
    bootstrap_truncated: bool = option(
        False,
        "Bootstrap answers that were truncated at the token limit: the value after the last token replaces the"
        " missing return. Off: the return ends there.",
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
