from typing import Literal

from pydantic import Field

from rollover.config.base import Table


class TrainConfig(Table):
    """[train]: the optimizer and how a batch is cut."""

    num_steps: int = Field(default=100, ge=0, description="Training steps (one batch of groups_per_step groups each).")
    learning_rate: float = Field(default=1e-6, ge=0, description="Peak learning rate of AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning rate after warm-up."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up.")
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="linear, cosine: final learning rate as a share of the peak."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay (matrices only).")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW beta 1.")
    adam_beta2: float = Field(default=0.99, ge=0, lt=1, description="AdamW beta 2.")
    adam_eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon.")
    max_grad_norm: float = Field(default=1.0, ge=0, description="Clip the global gradient norm; 0 = off.")
    minibatches_per_step: int = Field(
        default=1, ge=1, description="Optimizer steps per training step; groups are split evenly."
    )
    streaming_min_groups: int = Field(
        default=0,
        ge=0,
        description="Compute the gradient of groups of a step as soon as so many are ready, while the others are still"
        " generated or scored; weights change at its end as ever. 0 = when all of the step's groups are there.",
    )
    publish_every: int = Field(
        default=1, ge=1, description="Training steps between two hand-overs of weights to the engine."
    )
    micro_batch_tokens: int = Field(
        default=2048, ge=1, description="Token budget of one forward/backward (a longer sample is alone)."
    )
    skip_zero_advantage: bool = Field(
        default=True, description="Leave out samples whose advantages are all 0; the gradient is the same."
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass to save memory."
    )
    profile_steps: list[int] = Field(
        default_factory=list, description="Steps (from 1) whose torch profiler trace is written."
    )
