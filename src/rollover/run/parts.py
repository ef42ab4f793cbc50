"""What a training run is made of, built from its configuration: every room builds its own. Owns nothing afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from rollover.algorithms.filters import build_group_filter
from rollover.algorithms.grouping import Grouping
from rollover.algorithms.shaping import metric_of
from rollover.cluster.protocol import Cluster, ClusterSetup, open_cluster
from rollover.config import Config
from rollover.config.backend import needs_weights_here
from rollover.engine.build import EngineSetup, build_engine
from rollover.engine.protocol import Engine
from rollover.envs.protocol import RunEnvironment
from rollover.models import kernels
from rollover.models.devices import engine_device, pick_device
from rollover.models.load import LoadedModel, load_model, load_outline, stop_token_ids
from rollover.models.threads import most_threads, prepare_process
from rollover.rewards.protocol import ScoringPool
from rollover.rewards.scorer import RewardObserver, build_rewarder
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Lifecycle, RunClock
from rollover.rollout.requests import Requests
from rollover.rollout.watchdog import Watchdog
from rollover.run.environment import start_environment
from rollover.run.supervised import Examples, load_examples
from rollover.tasks.prompts import PromptSource, build_prompts, prompt_limit
from rollover.tasks.reroll import Reroll
from rollover.track.lifetimes import Lifetimes
from rollover.track.trace import Trace
from rollover.trainer.batch import BatchBuilder
from rollover.trainer.distill import teacher_prompts
from rollover.trainer.reuse import Reuse
from rollover.trainer.trainer import Trainer, build_trainer

logger = logging.getLogger(__name__)


class Model:
    """The model of a run. A call loads it once; all calls give the same one until it is `renewed`."""

    def __init__(self, load: Callable[[], LoadedModel]) -> None:
        self._load = load
        self._loaded: LoadedModel | None = None

    def __call__(self) -> LoadedModel:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def renewed(self) -> LoadedModel:
        """The model as it was loaded: whoever trained the one before has changed it."""
        self._loaded = None
        return self()


@dataclass
class Kept:
    """What goes on where the trainer's backend is lost: everything else is made anew beside it."""

    model: Model
    cluster: Cluster
    engine: Engine
    observed: RewardObserver[ScoringPool]

    @classmethod
    async def begin(cls, config: Config, device: torch.device, logs: Path | None) -> Kept:
        """Starts an engine. ValueError as `open_cluster` and `build_engine`."""
        model = Model(
            lambda: (
                load_model(config.model, device=device) if needs_weights_here(config) else load_outline(config.model)
            )
        )
        # The engine first: one elsewhere loads the model while we do, and one here copies the weights before the
        # trainer casts them or adds adapters.
        cluster, threads = open_cluster(ClusterSetup(config, logs)), most_threads(config)
        async with AsyncExitStack() as on_error:
            on_error.push_async_callback(cluster.close)
            engine = build_engine(EngineSetup(config, model, threads, logs=logs, own_server=cluster.own_server))
            observed = build_rewarder(config, training=True, pool=cluster.reward_pool())
            on_error.pop_all()
        return cls(model, cluster, engine, observed)

    async def close(self) -> None:
        """End the engine, the reward workers and what is left of them on a cluster, each even if another fails."""
        async with AsyncExitStack() as rest:
            rest.push_async_callback(self.cluster.close)
            rest.push_async_callback(self.observed.rewarder.close)
            await self.engine.close()


@dataclass
class Parts:
    """Everything a training run is made of, but for what is written to its directory."""

    kept: Kept
    again: bool
    """Whether `kept` was there before: the backend of this run was lost."""
    loaded: LoadedModel
    trainer: Trainer
    lifecycle: Lifecycle
    prompts: PromptSource
    engine: Engine
    rewarder: ScoringPool
    observed: RewardObserver
    """Over `rewarder`: what scores."""
    environment: RunEnvironment
    """What rollouts meet, in training and in evaluations; it asks `observed` for scores."""
    driver: Driver
    stop_token_ids: frozenset[int]
    batches: BatchBuilder
    """Of the groups of each step."""
    reuse: Reuse
    trace: Trace
    lifetimes: Lifetimes
    examples: Examples | None = None
    """Of a supervised run."""

    @classmethod
    async def build(
        cls,
        config: Config,
        trace: Trace | None = None,
        logs: Path | None = None,
        kept: Kept | None = None,
        on_abandon: Callable[[], None] | None = None,
    ) -> Parts:
        """Loads the model and starts nothing but an engine, unless one is `kept`: a reward worker starts at its first
        call. The clock of `trace` goes on from now. `logs`: see
        EngineSetup and BackendSetup; `on_abandon`: see Driver."""
        prepare_process(config)
        torch.manual_seed(config.run.seed)
        # Whatever fails at once for a wrong path, name or device comes first: loading the model takes longer.
        devices = pick_device(config.model.device), engine_device(config)
        for reason in {kernels.unavailable_reason(device.type) for device in devices} - {""}:
            logger.warning(reason)
        prompts_for = build_prompts(config)
        grouping, advantage = Grouping(config.workflow), config.algorithm.advantage
        group_filter = build_group_filter(
            config.filters,
            taught=config.distill.replaces_for,
            has_signal=lambda group, metric: grouping.has_signal(group, advantage, metric),
            untrained=config.workflow.untrained,
            metric=metric_of(config),
        )
        again = kept is not None
        async with AsyncExitStack() as on_error:  # an engine may be a process: nobody else would end it
            if kept is None:
                kept = await Kept.begin(config, devices[0], logs)
                on_error.push_async_callback(kept.close)
            loaded, engine, observed = kept.model.renewed() if again else kept.model(), kept.engine, kept.observed
            stops = stop_token_ids(loaded, config.rollout.stop_token_ids)
            examples = load_examples(config, loaded) if config.algorithm.supervised else None
            trainer = build_trainer(config, loaded, engine, logs, kept.cluster.own_ranks)
            on_error.callback(trainer.close)
            pool = observed.rewarder
            trace = trace or Trace(RunClock())
            lifecycle = Lifecycle(
                config.rollout,
                config.engine.max_running,
                config.min_valid_rewards,
                group_filter=group_filter,
                num_valid=Grouping(config.workflow, config.distill).max_valid,
                clock=trace.clock,
            )
            environment = await start_environment(config, loaded, observed, engine, on_error, lifecycle.keep)
            if environment.notice:
                logger.warning(environment.notice)
            prompts = prompts_for(environment.prompt, prompt_limit(config, engine.max_tokens))
            reroll = Reroll(config.reroll, config.train.num_steps, prompts)
            scoring_s = config.rewards.allowed_s(config.rollout.rollouts_per_group)
            watchdog = Watchdog(
                config.watchdog,
                scoring_s,
                scoring_blocked=lambda: pool.is_stalled,
                max_filtered_steps=config.filters.give_up_after_steps,
            )
            requests = Requests(config.rollout, config.run.seed, stops, may_go_on=environment.has_turns)
            driver = Driver(lifecycle, engine, reroll, environment, requests, watchdog, config.workflow, on_abandon)
            reuse = Reuse(config, reroll, prompts.curriculum)
            lifecycle.clock.resume()
            parts = cls(
                kept=kept,
                again=again,
                loaded=loaded,
                trainer=trainer,
                lifecycle=lifecycle,
                prompts=prompts,
                engine=engine,
                rewarder=pool,
                observed=observed,
                environment=environment,
                driver=driver,
                stop_token_ids=stops,
                batches=BatchBuilder(config, reuse.buffer, teacher_prompts(config, loaded, environment)),
                reuse=reuse,
                trace=trace,
                lifetimes=Lifetimes(),
                examples=examples,
            )
            on_error.pop_all()
        return parts

    async def close(self, *, keep: bool = False) -> None:
        """End what is in flight, the backend, the engine and the reward workers, each even if another fails.

        `keep`: the backend is lost; engine and reward workers go on.
        """
        async with AsyncExitStack() as parts:
            if not keep:
                parts.push_async_callback(self.kept.close)
            parts.callback(self._close_lost_backend if keep else self.trainer.close)
            parts.push_async_callback(self.environment.close)
            await self.driver.abandon()

    def _close_lost_backend(self) -> None:
        """What of it cannot be ended has ended by itself."""
        try:
            self.trainer.close()
        except Exception as error:  # boundary: it is not what it was
            logger.warning(f"the backend that is lost could not be closed ({error}): the run goes on without it")
