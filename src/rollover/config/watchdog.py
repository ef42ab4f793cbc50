from pydantic import Field

from rollover.config.base import Table


class WatchdogConfig(Table):
    """[watchdog]: when a wait counts as a stall, which is named and ended (docs/watchdog.md)."""

    rollout_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="A rollout that gets no token for so long is interrupted and continued from the tokens it has;"
        " 0 = off.",
    )
    max_stalls: int = Field(
        default=2,
        ge=1,
        description="A rollout that stalls so often without a token in between is dropped, with its group"
        " (dropped/stalled).",
    )
    grace_s: float = Field(
        default=30.0, gt=0, description="An interrupted rollout that does not return within so long is cancelled."
    )
    max_failures: int = Field(
        default=8,
        ge=1,
        description="A rollout at which the engine fails so often in a row, with an error or an answer that cannot come"
        " next, is dropped, with its group (dropped/failed).",
    )
    retry_s: float = Field(
        default=0.5,
        gt=0,
        description="The engine is asked again so long after its first failure at a rollout, then after twice as long"
        " each time, up to 30 s.",
    )
    reward_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="A group's scoring that takes so much longer than the limits of [rewards] allow is cancelled and"
        " repeated once; then its rewards are missing. 0 = off.",
    )
    weights_timeout_s: float = Field(
        default=60.0,
        ge=0,
        description="Handing new weights to the engine gives a warning after so long, again at doubling times; 0 ="
        " off.",
    )
    train_timeout_s: float = Field(
        default=1800.0,
        ge=0,
        description="Training that takes so long in one step gives a warning, again at doubling times; 0 = off.",
    )
