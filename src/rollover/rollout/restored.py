"""What a restarted run refuses: held rollouts with which its configuration, or its engine, cannot go on."""

from __future__ import annotations

from rollover.rollout.lifecycle import Lifecycle
from rollover.staleness import beyond_bound
from rollover.types import RolloutState


def check_restored(lifecycle: Lifecycle, version: int, max_tokens: int) -> None:
    """ValueError where this config cannot go on with the rollouts that a snapshot brought back.

    `version`: the trainer's. `max_tokens`: the longest rollout, prompt included, that the engine takes.
    """
    config = lifecycle.config
    groups = lifecycle.cache.groups.values()
    if config.finish_first and beyond_bound(groups, version, config.max_staleness, config.groups_per_step):
        raise ValueError(
            f"--resume: the {len(groups)} groups that the checkpoint holds cannot all be trained with"
            f" rollout.max_staleness = {config.max_staleness} and rollout.groups_per_step = {config.groups_per_step}."
            " Set them back to what the run had (config.resolved.json), or set"
            ' rollout.on_stale = "drop" to lose groups that get too old'
        )
    for rollout in (r for g in groups for r in g.rollouts):
        unfinished = rollout.state in (RolloutState.WAITING, RolloutState.PARKED, RolloutState.ACTING)
        if unfinished and len(rollout.prompt) + config.max_new_tokens > max_tokens:
            raise ValueError(
                f"--resume with rollout.max_new_tokens = {config.max_new_tokens}: the unfinished rollout"
                f" {rollout.rollout_id} has a prompt of {len(rollout.prompt)} and {rollout.num_tokens} tokens so"
                f" far, and the engine takes {max_tokens} in all. Set it (and engine.kv_memory_gb) back to what the run"
                " had"
            )
        for segment in rollout.segments:
            was = segment.sampling.temperature
            if segment.trainable and was not in (0.0, config.temperature):
                raise ValueError(
                    f"--resume with rollout.temperature = {config.temperature:g}: rollout"
                    f" {rollout.rollout_id} was begun at {was:g}, and a rollout has one temperature."
                    f" Set rollout.temperature = {was:g}"
                )
