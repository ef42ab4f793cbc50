"""The rules about [replay] and [reroll]: options without effect, and combinations that are refused."""

from __future__ import annotations

from rollover.config.rule import Inert, Refused

_OF_REROLL = ("reroll.start_fraction", "reroll.failed_at_most", "reroll.size")

INERT: tuple[Inert, ...] = (
    Inert(
        ("replay.max_staleness",),
        ("replay.size",),
        lambda c: c.replay.size == 0,
        "with replay.size = 0 (no group is kept)",
        "Set replay.size",
    ),
    Inert(
        _OF_REROLL,
        ("reroll.max_groups",),
        lambda c: c.reroll.max_groups == 0,
        "with reroll.max_groups = 0 (no task is given again)",
        "Set reroll.max_groups",
    ),
    Inert(
        ("reroll.max_groups",),
        ("run.replay_rollouts",),
        lambda c: bool(c.run.replay_rollouts),
        "with run.replay_rollouts: recorded rollouts are trained as they are",
    ),
)

REFUSED: tuple[Refused, ...] = (
    Refused(
        ("replay.max_staleness", "rollout.max_staleness"),
        lambda c: c.replay.size > 0 and c.replay.max_staleness <= c.staleness_bound,
        lambda c: (
            f"replay.max_staleness = {c.replay.max_staleness} is not above the bound of fresh rollouts, which is"
            f" {c.staleness_bound}: a group that waited for its step would be too old to be replayed. Set it to"
            f" {c.staleness_bound + 1} or more"
        ),
    ),
    Refused(
        ("replay.size", "algorithm.advantage"),
        lambda c: c.replay.size > 0 and c.algorithm.needs_critic,
        lambda c: (
            'replay.size with algorithm.advantage = "gae": the critic finds a signal in every group, so that none is'
            " replaced. Remove replay.size"
        ),
    ),
    Refused(
        ("replay.size", "rollout.group_size"),
        lambda c: c.replay.size > 0 and c.rollout.group_size < 2,
        lambda c: (
            "replay.size with rollout.group_size = 1: a group's score is 0 without a spread of its rewards, so that"
            " none is kept. Set rollout.group_size to 2 or more, or remove replay.size"
        ),
    ),
    Refused(
        ("reroll.max_groups", "rollout.groups_per_step"),
        lambda c: c.reroll.max_groups > c.rollout.groups_per_step,
        lambda c: (
            f"reroll.max_groups = {c.reroll.max_groups} is above rollout.groups_per_step ="
            f" {c.rollout.groups_per_step}: nothing but failed tasks would be left. Lower it"
        ),
    ),
)
