"""Builds the episodes of a run from the configuration: the workflow, and the gateway for agents that call over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rollover import registry
from rollover.config import WorkflowConfig
from rollover.envs.protocol import EnvironmentSetup, Keep, keeps_nothing
from rollover.functions import custom_function
from rollover.rewards.protocol import Rewarder, ScoreRequest
from rollover.rewards.registry import TrainerState
from rollover.rewards.scorer import trainer_state
from rollover.types import Reward, SamplingParams, Task
from rollover.workflows.command import WorkflowCommand
from rollover.workflows.conversations import Chats
from rollover.workflows.episodes import Episodes
from rollover.workflows.pool import WorkflowPool
from rollover.workflows.protocol import KEY, RETURNS, Workflow, WorkflowFunction, is_async
from rollover.workflows.turns import EpisodeLimits


def build_episodes(
    setup: EnvironmentSetup, max_tokens: int, rewarder: Rewarder, keep: Keep = keeps_nothing
) -> Episodes:
    """Build the episodes of a run. `max_tokens`: the engine's longest rollout, prompt included. `rewarder` scores a
    program's answers. ValueError for an invalid workflow, an unsuitable chat template, or a missing package."""
    config, workflow, rollout = setup.config, setup.config.workflow, setup.config.rollout
    plays = build_workflow(workflow, rollout.sampling, rewarder, partial(trainer_state, config))
    chats = Chats(
        setup.tokenizer,
        vocab_size=setup.vocab_size,
        keep_special_tokens=rollout.keep_special_tokens,
        processor=setup.processor,
    )
    chats.for_tools(()).require("user")
    limits = EpisodeLimits(
        max_new_tokens=rollout.max_new_tokens,
        max_prompt_tokens=max_tokens - rollout.max_new_tokens,
        max_turns=workflow.max_turns,
        timeout_s=workflow.timeout_s,
        on_timeout=workflow.on_timeout,
        timeout_score=workflow.timeout_score,
        retries=workflow.retries,
        precomputed=lambda role: workflow.advantage_of(role, config.algorithm.advantage) == "precomputed",
        max_tokens=workflow.max_tokens,
        stop=tuple(rollout.stop),
        image_urls=config.tasks.allow_image_urls,
    )
    gateway = None
    if plays.over_http:
        _require_extra(plays)
        from rollover.workflows.gateway import Gateway

        gateway = Gateway(plays, setup.tokenizer, rollout.sampling, workflow.port)
    return Episodes(plays, chats, limits, gateway, resumes=workflow.resume != "restart", keep=keep)


def build_workflow(
    workflow: WorkflowConfig,
    sampling: SamplingParams,
    rewarder: Rewarder,
    state_of: Callable[[Task, int], TrainerState] = lambda task, version: TrainerState(),
) -> Workflow:
    """Build the workflow that plays the episodes. `state_of`: (task, policy version) -> TRL's trainer_state for its
    rewards. ValueError, with the fix, for an invalid one."""
    if workflow.verifiers:
        return registry.load("workflows", "verifiers")(workflow, sampling)
    if workflow.command:

        async def score(task: Task, answer: str, version: int) -> Reward:
            state = state_of(task, version)
            [reward] = await rewarder.score([ScoreRequest(task, answer, trainer_state=state)])
            return reward

        memory_bytes = int(workflow.memory_gb * 1e9)
        return WorkflowCommand(workflow.command, score, workflow.num_processes, memory_bytes, workflow.env)
    spec, function = workflow.function, custom_function(KEY, workflow.function, RETURNS).function
    if not workflow.num_processes:
        return WorkflowFunction(function, spec)
    if is_async(function):
        raise ValueError(
            f"workflow.num_processes = {workflow.num_processes} with {KEY} = {spec!r}, an async def: it runs on the"
            " run's own event loop. Remove workflow.num_processes, or write a plain def"
        )
    return WorkflowPool(function, spec, workflow.num_processes, workflow.memory_gb, workflow.env)


def _require_extra(workflow: Workflow) -> None:
    try:
        import openai  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{workflow.spec} asks the policy over HTTP, for which {error.name} is missing: pip install"
            " 'rollover[agents]'. An async def with the parameter episode does without:"
            " episode.trajectory().chat(messages)"
        ) from error
