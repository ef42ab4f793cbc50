from typing import Literal

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
    journal_s: float = Field(
        default=5.0,
        ge=0,
        description="Between checkpoints, write down at once what happens to rollouts, and every so many seconds the"
        " new tokens of those that run; as often it is brought to the disk. A killed run goes on from there. 0 = no"
        " journal.",
    )
    journal_max_gb: float = Field(
        default=2.0, gt=0, description="Write a checkpoint early when the journal is larger than that."
    )
    lost_steps: Literal["replay", "roll_back"] = Field(
        default="replay",
        description="What a resumed run does about steps that were trained after its checkpoint. replay: they are"
        " trained again on the same rollouts, from the journal (not if settings changed that change what training"
        " does). roll_back: training goes on from the checkpoint's weights; rollouts are kept where the staleness bound"
        " allows.",
    )
    save_final_model: bool = Field(default=True, description="Write <run.dir>/model for transformers at the end.")
