from typing import Annotated, Literal

from pydantic import Field

from rollover.config.base import Table


class RunConfig(Table):
    """[run]: what this run is called, where it writes, and its seed."""

    name: str = Field(default="run", description="Name of the run; part of the default directory.")
    dir: str = Field(default="", description="Directory the run writes to. Default: runs/<name>-<time>.")
    seed: int = Field(default=0, description="Seed of tasks, sampling and initial LoRA weights.")
    threads: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        description="CPU threads for torch; 0 = one per core that this process may use. auto: of those the number that"
        " is fastest now, tried now and again, for engine and trainer each. Bit-equal results need a number.",
    )
    replay_rollouts: str = Field(
        default="",
        description="Train from the recorded rollouts of this directory (a run's rollouts/) without generating.",
    )
