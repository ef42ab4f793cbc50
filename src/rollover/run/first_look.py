"""What is looked at before a run takes its first step: every reward function, and what the tasks are."""

from __future__ import annotations

from rollover.config import Config
from rollover.rewards.pool import RewardPool
from rollover.tasks.report import tasks_line
from rollover.tasks.stream import TaskStream
from rollover.track.tracker import Trackers


async def look_at_tasks(config: Config, rewarder: RewardPool, trackers: Trackers) -> None:
    """Call every source's reward function once, and say what the tasks are. RewardProbeError names what is wrong."""
    trackers.on_phase("checking the reward functions")
    for source in config.tasks.sources:
        alone = config.tasks.model_copy(update={"sources": [source]})
        task = TaskStream(alone, seed=config.run.seed, split="train", rewards=config.rewards).next()
        if task is not None:
            await rewarder.probe(task)
    trackers.on_phase("looking at the tasks")
    if line := tasks_line(config):
        trackers.on_message(line)
