"""Checks before the first step of a run: every reward function, a teacher's prompts, the tasks."""

from __future__ import annotations

import contextlib
import itertools
import logging

from rollover.config import Config
from rollover.rewards.built_in import statements
from rollover.rewards.protocol import ScoringPool
from rollover.tasks.report import tasks_line
from rollover.tasks.stream import TaskStream
from rollover.track.tracker import Trackers
from rollover.trainer.distill import TeacherPrompts
from rollover.types import Task

logger = logging.getLogger(__name__)

_LOOKED_AT = 100  # tasks of a source, for the rewards that their data_source gives them


async def check_tasks(
    config: Config, rewarder: ScoringPool, trackers: Trackers, teacher_prompts: TeacherPrompts | None = None
) -> None:
    """Call every source's reward functions once, and distill.privileged, and say what the tasks are. RewardProbeError
    and FunctionError name what is wrong."""
    trackers.on_phase("checking the reward functions")
    told: dict[str, None] = {}
    for source in config.tasks.sources:
        alone = config.tasks.model_copy(update={"sources": [source]})
        tasks = _one_of_each_reward(TaskStream(alone, config.run.seed, "train", rewards=config.rewards))
        for task in [] if config.workflow.agent else tasks:  # an agent gives the rewards itself
            await rewarder.probe(task)
            with contextlib.suppress(ValueError):  # what scores may be another machine: it was asked above
                told |= dict.fromkeys(statements(task.reward))
        if tasks and teacher_prompts is not None:
            teacher_prompts.encode_task(tasks[0])
    if config.rewards.eval_function and config.eval.num_tasks and not config.workflow.agent:
        stream = TaskStream(config.tasks, config.eval.seed, "eval", rewards=config.rewards)
        for task in stream.take(1):
            await rewarder.probe(task)
    for line in told:
        logger.warning(line)
    trackers.on_phase("looking at the tasks")
    if line := tasks_line(config):
        logger.info(line)


def _one_of_each_reward(stream: TaskStream) -> list[Task]:
    """The first task, and where tasks say their data_source, those among the next ones that have another reward."""
    found: dict[str, Task] = {}
    for task in itertools.islice(iter(stream.next, None), _LOOKED_AT):
        found.setdefault(task.reward, task)
        if "data_source" not in task.columns:
            break
    return list(found.values())
