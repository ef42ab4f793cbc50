"""What the policy meets in a run or an evaluation: an environment, or the episodes of a workflow and their server."""

from __future__ import annotations

from contextlib import AsyncExitStack

from rollover.envs.build import EnvironmentSetup, build_environment
from rollover.envs.protocol import Environment
from rollover.rewards.protocol import Rewarder
from rollover.workflows.build import EpisodeServer, build_episodes


async def start_environment(
    setup: EnvironmentSetup, rewarder: Rewarder, max_tokens: int, on_error: AsyncExitStack
) -> tuple[Environment, EpisodeServer | None]:
    """The one that the configuration names, and the server for its agents, which is up, where a workflow has some.

    `rewarder` scores what a program answers without a reward. `max_tokens`: the longest rollout, prompt included, that
    the engine takes. `on_error` is told how to close it.
    ValueError where it cannot be used.
    """
    config = setup.config
    if not config.workflow.agent:
        return build_environment(setup), None
    episodes = build_episodes(setup, max_tokens, rewarder)
    server = EpisodeServer(episodes, config.workflow.port)
    on_error.push_async_callback(server.close)
    await server.start()
    return episodes, server
