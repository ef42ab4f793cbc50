from pydantic import Field

from rollover.config.base import Table


class ReplayConfig(Table):
    """[replay]: trained groups of high signal, trained again in place of groups without any (docs/replay.md)."""

    size: int = Field(default=0, ge=0, description="Trained groups that are kept, those of the largest score; 0 = off.")
    max_staleness: int = Field(
        default=4,
        ge=1,
        description="Bound on trainer_version - policy_version of every replayed token in the loss. It is above the"
        " bound of fresh ones (rollout.max_staleness).",
    )
