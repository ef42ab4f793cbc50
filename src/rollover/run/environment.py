"""What the policy meets in a run or an evaluation: an environment, or the episodes of a workflow and their server."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from rollover.config import Config
from rollover.engine.protocol import Engine
from rollover.envs.build import build_environment
from rollover.envs.protocol import EnvironmentSetup, Keep, RunEnvironment, keeps_nothing
from rollover.models.load import LoadedModel
from rollover.rewards.scorer import RewardObserver, make_scorer
from rollover.workflows.build import build_episodes


async def start_environment(
    config: Config,
    loaded: LoadedModel,
    rewarder: RewardObserver,
    engine: Engine,
    on_error: AsyncExitStack,
    keep: Keep = keeps_nothing,
) -> RunEnvironment:
    """The one that the configuration names; where a workflow has agents, their server is up.

    `rewarder` scores rollouts, and what a program answers without a reward. `keep` is told of what is to be known after
    a kill. The engine's `max_tokens` is known afterwards. `on_error` is told how to close the environment. ValueError
    where that cannot be used.
    """
    scorer = make_scorer(rewarder, loaded.tokenizer, config)
    singly = rewarder.rewarder.scores_singly
    setup = EnvironmentSetup(config, loaded.tokenizer, scorer, singly, loaded.vocab_size, loaded.processor)
    longest = await asyncio.to_thread(lambda: engine.max_tokens)  # a Ctrl-C ends the wait for an engine
    if not config.workflow.agent:
        return build_environment(setup, keep)
    episodes = build_episodes(setup, longest, rewarder, keep)
    on_error.push_async_callback(episodes.close)
    await episodes.start()
    return episodes
