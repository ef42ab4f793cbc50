from pydantic import Field

from rollover.config.base import Table


class RerollConfig(Table):
    """[reroll]: tasks whose rollouts all failed are given again, later in the run (docs/replay.md)."""

    max_groups: int = Field(default=0, ge=0, description="Failed tasks given again per step, at most; 0 = off.")
    start_fraction: float = Field(
        default=0.5, ge=0, lt=1, description="Share of train.num_steps after which failed tasks are given again."
    )
    failed_at_most: float = Field(
        default=0.0, description="A task has failed if all its rollouts have the same reward, and it is not above this."
    )
    size: int = Field(
        default=1000, ge=1, description="Failed tasks that wait, each once; a further one is dropped and counted."
    )
