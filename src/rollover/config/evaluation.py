from pydantic import Field

from rollover.config.base import Table


class EvalConfig(Table):
    """[eval]: evaluation on held-out tasks, before, during and after training."""

    num_tasks: int = Field(default=0, ge=0, description="Held-out tasks; 0 = no evaluation.")
    samples_per_task: int = Field(default=1, ge=1, description="Rollouts per held-out task; pass@k up to this k.")
    every_steps: int = Field(
        default=0, ge=0, description="Evaluate every so many steps; 0 = only before and after training."
    )
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature of evaluation; 0 = greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling of evaluation; 1 = off.")
    pass_threshold: float = Field(default=1.0, description="A rollout passes if its score is at least this.")
    seed: int = Field(default=1_000_003, description="Seed of the held-out tasks and of their sampling.")
