from pydantic import Field

from rollover.config.base import Table


class RunConfig(Table):
    """[run]: what this run is called, where it writes, and its seed."""

    name: str = Field(default="run", description="Name of the run; part of the default directory.")
    dir: str = Field(default="", description="Directory the run writes to. Default: runs/<name>-<time>.")
    seed: int = Field(default=0, description="Seed of tasks, sampling and initial LoRA weights.")
    threads: int = Field(
        default=0, ge=0, description="CPU threads for torch; 0 = one per core that this process may use."
    )
    replay_rollouts: str = Field(
        default="",
        description="Train from the recorded rollouts of this directory (a run's rollouts/) without generating.",
    )
