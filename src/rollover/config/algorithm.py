from typing import Literal

from pydantic import Field

from rollover.config.base import Table


class AlgorithmConfig(Table):
    """[algorithm]: advantages, loss and off-policy correction. A preset sets them below every file."""

    preset: Literal["grpo", "dapo", "dr_grpo"] = Field(default="grpo", description="Named set of the values below.")
    advantage: Literal["grpo", "dr_grpo", "rloo"] = Field(default="grpo", description="Advantage estimator.")
    advantage_std: Literal["sample", "population", "batch", "none"] = Field(
        default="sample", description="grpo: standard deviation that advantages are divided by."
    )
    loss: Literal["clip", "reinforce"] = Field(default="clip", description="Policy loss.")
    clip_low: float = Field(
        default=0.2, gt=0, description="clip: lower clip of the current/proximal ratio, 1 - clip_low."
    )
    clip_high: float = Field(
        default=0.2, gt=0, description="clip: upper clip of the current/proximal ratio, 1 + clip_high."
    )
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = Field(default="token-mean", description="How per-token losses become one number.")
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        default="token_truncate",
        description="Importance weight proximal/behavior on every token: truncated at, or masked above,"
        " correction_cap.",
    )
    correction_cap: float = Field(default=2.0, gt=1, description="Cap of the importance weight.")
    allow_uncorrected: bool = Field(
        default=False, description="Permit stale or truncated sampling with correction = none."
    )
