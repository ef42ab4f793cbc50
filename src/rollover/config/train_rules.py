"""The rules about [train]: options without effect, and combinations that are refused."""

from __future__ import annotations

from rollover.config.algorithm import OVER_THE_BATCH
from rollover.config.rule import Inert, Refused

_STREAMING = "train.streaming_min_groups"

INERT: tuple[Inert, ...] = (
    Inert(
        (_STREAMING,),
        ("rollout.groups_per_step",),
        lambda c: c.train.streaming_min_groups >= c.rollout.groups_per_step,
        "unless it is below rollout.groups_per_step",
        "Lower it",
    ),
)

REFUSED: tuple[Refused, ...] = (
    Refused(
        (_STREAMING, "train.minibatches_per_step"),
        lambda c: c.train.streaming_min_groups > 0 and c.train.minibatches_per_step > 1,
        lambda c: (
            f"{_STREAMING} with train.minibatches_per_step = {c.train.minibatches_per_step}: the groups of a minibatch"
            " are known when the whole step is there. Set one of the two back to its default"
        ),
    ),
    Refused(
        (_STREAMING, "algorithm.advantage", "algorithm.advantage_std"),
        lambda c: (
            c.train.streaming_min_groups > 0
            and (
                c.algorithm.advantage in OVER_THE_BATCH
                or ":" in c.algorithm.advantage
                or c.algorithm.advantage_std == "batch"
            )
        ),
        lambda c: (
            f"{_STREAMING} with algorithm.advantage = {c.algorithm.advantage!r}, advantage_std ="
            f" {c.algorithm.advantage_std!r}: the advantages depend on all groups of the step (or may: your own"
            f" function). Remove {_STREAMING}, or use an estimator over the group alone, such as grpo or rloo"
        ),
    ),
    Refused(
        (_STREAMING, "algorithm.after_scoring"),
        lambda c: c.train.streaming_min_groups > 0 and bool(c.algorithm.after_scoring),
        lambda c: (
            f"{_STREAMING} with algorithm.after_scoring: that function sees the whole batch. Remove one of the two"
        ),
    ),
)
