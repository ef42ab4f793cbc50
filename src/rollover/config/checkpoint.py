from pydantic import Field

from rollover.config.base import Table


class CheckpointConfig(Table):
    """[checkpoint]: snapshots of weights, optimizer and every unfinished rollout."""

    every_steps: int = Field(
        default=50, ge=0, description="Write a checkpoint every so many steps; 0 = only at the end and on Ctrl-C."
    )
    keep: int = Field(
        default=2, ge=1, description="Checkpoints kept; older ones are deleted after a new one is committed."
    )
    dir: str = Field(
        default="", description="Where checkpoints go: local path or fsspec URL. Default: <run.dir>/checkpoints."
    )
    resume_from: str = Field(
        default="", description="With --resume: name of the checkpoint to use (step-000020); empty = the newest."
    )
    save_final_model: bool = Field(default=True, description="Write <run.dir>/model for transformers at the end.")
