from typing import Literal

from pydantic import Field

from rollover.config.base import Table


class RolloutConfig(Table):
    """[rollout]: how much is generated at once, when generation is interrupted, and how old tokens may get."""

    groups_per_step: int = Field(default=8, ge=1, description="Groups (tasks) trained in one step.")
    group_size: int = Field(default=8, ge=1, description="Sibling rollouts of one task.")
    max_new_tokens: int = Field(
        default=256, ge=1, description="Cumulative limit of a rollout's tokens over all its segments."
    )
    in_flight_groups: int = Field(
        default=0, ge=0, description="Groups held at once (admitted, not yet trained or dropped); 0 = groups_per_step."
    )
    interrupt: Literal["never", "when_enough"] = Field(
        default="never",
        description="never: a step waits for every rollout in flight. when_enough: generation is interrupted as soon"
        " as groups_per_step groups are ready; the rest roll over to the next step.",
    )
    max_staleness: int = Field(
        default=0, ge=0, description="Bound on trainer_version - policy_version of every token in the loss."
    )
    on_stale: Literal["", "finish_first", "drop"] = Field(
        default="",
        description="finish_first (default): no new weights while a held group would pass the bound. drop: such a"
        " group is dropped, with a counter.",
    )
    kv_on_resume: Literal["recompute", "keep", "salt"] = Field(
        default="recompute",
        description="KV cache of interrupted rollouts after a weight update. recompute: prefilled again under the new"
        " weights. keep: everything is reused. salt: running rollouts keep theirs, new requests do not see it.",
    )
    order: Literal["oldest_first", "longest_first", "shortest_remaining", "fifo"] = Field(
        default="oldest_first", description="Order in which parked rollouts are resumed, before any new one starts."
    )
    temperature: float = Field(
        default=1.0, ge=0, description="Sampling temperature of training rollouts (above 0 to be trained)."
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Nucleus sampling; 1 = off. Truncation requires a correction."
    )
    top_k: int = Field(default=0, ge=0, description="Sample from the k likeliest tokens; 0 = off.")
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="Drop tokens below min_p times the likeliest one's probability; 0 = off."
    )
    stop: list[str] = Field(default_factory=list, description="Strings that end a rollout (kept in its text).")
    stop_token_ids: list[int] = Field(default_factory=list, description="Token ids that end a rollout, besides EOS.")
