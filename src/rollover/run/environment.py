"""What the policy meets in a run or an evaluation: an environment, or the episodes of a workflow and their server."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from rollover.config import Config
from rollover.engine.protocol import Engine
from rollover.envs.build import EnvironmentSetup, build_environment
from rollover.envs.protocol import Environment
from rollover.models.load import LoadedModel
from rollover.rewards.observer import RewardObserver
from rollover.rewards.scorer import make_scorer
from rollover.workflows.build import EpisodeServer, build_episodes


async def start_environment(
    config: Config, loaded: LoadedModel, rewarder: RewardObserver, engine: Engine, on_error: AsyncExitStack
) -> tuple[Environment, EpisodeServer | None]:
    """The one that the configuration names, and the server for its agents, which is up, where a workflow has some.

    `rewarder` scores rollouts, and what a program answers without a reward. The engine's `max_tokens` is known
    afterwards. `on_error` is told how to close the server. ValueError where the environment cannot be used.
    """
    scorer = make_scorer(rewarder, loaded.tokenizer, config)
    singly = rewarder.rewarder.scores_singly
    setup = EnvironmentSetup(config, loaded.tokenizer, scorer, singly, loaded.vocab_size, loaded.processor)
    longest = await asyncio.to_thread(lambda: engine.max_tokens)  # a Ctrl-C ends the wait for an engine
    if not config.workflow.agent:
        return build_environment(setup), None
    episodes = build_episodes(setup, longest, rewarder)
    server = EpisodeServer(episodes, config.workflow.port)
    on_error.push_async_callback(server.close)
    await server.start()
    return episodes, server
