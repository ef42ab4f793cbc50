from typing import Literal

from pydantic import Field

from rollover.config.base import Table


class PlanConfig(Table):
    """[plan]: what `rollover plan` assumes about lengths, machines and speeds. No other verb reads it."""

    steps: int = Field(default=50, ge=2, description="Training steps to simulate.")
    seed: int = Field(default=0, ge=0, description="Seed of the lengths.")
    engines: int = Field(default=1, ge=1, description="Engines; each runs up to engine.max_running rollouts at once.")
    trainers: int = Field(
        default=0, ge=0, description="Trainer devices. 0: the engines' devices train too, in turns (colocated)."
    )
    lengths: Literal["lognormal", "bimodal", "pareto"] = Field(
        default="lognormal",
        description="Distribution of answer lengths, by its median and 99th percentile. bimodal: most answers near the"
        " median, long_share of them near the 99th percentile. pareto: a power-law tail.",
    )
    median_tokens: float = Field(default=64, gt=0, description="Median answer length.")
    p99_tokens: float = Field(default=512, gt=0, description="99th percentile of the answer lengths.")
    long_share: float = Field(default=0.1, gt=0, lt=1, description="Share of long answers (lengths = bimodal).")
    sibling_correlation: float = Field(
        default=0.0, ge=0, le=1, description="Correlation of the log lengths of siblings: hard tasks have long answers."
    )
    prompt_tokens: int = Field(default=32, ge=1, description="Prompt length.")
    decode_batches: list[int] = Field(
        default=[1, 32, 64, 256], description="Batch sizes at which decode_step_s is given; linear between them."
    )
    decode_step_s: list[float] = Field(
        default=[0.017, 0.05, 0.08, 0.29], description="Seconds of one decode step at these batch sizes."
    )
    prefill_tokens_per_s: float = Field(default=1500, gt=0, description="Prompt tokens an engine computes per second.")
    prefill_min_s: float = Field(
        default=0.05, ge=0, description="Seconds of the shortest prefill; what joins together is prefilled together."
    )
    train_tokens_per_s: float = Field(
        default=250, gt=0, description="Tokens, prompts included, that one trainer device trains per second."
    )
    weight_sync_s: float = Field(default=0.2, ge=0, description="Seconds from the end of a step to live weights.")
    reward_s: float = Field(default=0.0, ge=0, description="Seconds to score a group.")
