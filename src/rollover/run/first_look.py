"""What is looked at before a run takes its first step: every reward function, a teacher's prompts, what tasks are."""

from __future__ import annotations

import contextlib

from rollover.config import Config
from rollover.rewards.built_in import statements
from rollover.rewards.protocol import ScoringPool
from rollover.tasks.report import tasks_line
from rollover.tasks.stream import TaskStream
from rollover.track.tracker import Trackers
from rollover.trainer.teacher import TeacherPrompts


async def look_at_tasks(
    config: Config, rewarder: ScoringPool, trackers: Trackers, teacher_prompts: TeacherPrompts | None = None
) -> None:
    """Call every source's reward function once, and distill.privileged, and say what the tasks are. RewardProbeError
    and FunctionError name what is wrong."""
    trackers.on_phase("checking the reward functions")
    told: dict[str, None] = {}
    for source in config.tasks.sources:
        alone = config.tasks.model_copy(update={"sources": [source]})
        task = TaskStream(alone, seed=config.run.seed, split="train", rewards=config.rewards).next()
        if task is not None and not config.workflow.agent:  # which gives the rewards itself
            await rewarder.probe(task)
            with contextlib.suppress(ValueError):  # what scores may be another machine: it was asked above
                told |= dict.fromkeys(statements(task.reward))
        if task is not None and teacher_prompts is not None:
            teacher_prompts.of_task(task)
    for line in told:
        trackers.on_message(line)
    trackers.on_phase("looking at the tasks")
    if line := tasks_line(config):
        trackers.on_message(line)
