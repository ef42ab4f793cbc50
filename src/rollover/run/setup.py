"""Builds the components of a training run (`Components`) and of an evaluation (`EvalComponents`) from a configuration.

    Components.build: model, cluster, engine, rewards, trainer, lifecycle, environment, prompts, driver ──▶ RunContext

Each package has a `build` function of its own; this module calls them in order. `preflight` checks reward functions and
tasks before the first step. Owns nothing afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollover.algorithms.filters import build_group_filter
from rollover.algorithms.grouping import Grouping
from rollover.algorithms.shaping import metric_of
from rollover.checkpoint.journal import Journal
from rollover.cluster.protocol import Cluster, ClusterSetup, open_cluster
from rollover.config import Config, LoraConfig
from rollover.config.backend import is_tinker, needs_weights_here
from rollover.config.cluster import check_is_here
from rollover.engine.build import EngineSetup, build_engine
from rollover.engine.protocol import Engine
from rollover.envs.build import build_environment
from rollover.envs.protocol import EnvironmentSetup, Keep, RunEnvironment, keeps_nothing
from rollover.models import kernels
from rollover.models.devices import dtype_of, engine_device, pick_device
from rollover.models.load import LoadedModel, load_model, load_outline, stop_token_ids
from rollover.models.processor import Processor
from rollover.models.threads import most_threads, prepare_process
from rollover.rewards.built_in import statements
from rollover.rewards.protocol import Rewarder, ScoringPool
from rollover.rewards.scorer import RewardObserver, build_rewarder, make_scorer
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Lifecycle, RunClock
from rollover.rollout.requests import Requests
from rollover.rollout.watchdog import Watchdog
from rollover.run.directory import RunDirectory
from rollover.run.hooks import Hooks
from rollover.run.stop import Stop
from rollover.run.supervised import Examples, load_examples
from rollover.tasks.prompts import PromptSource, build_prompts, prompt_limit
from rollover.tasks.report import tasks_line
from rollover.tasks.reroll import Reroll
from rollover.tasks.stream import TaskStream
from rollover.track.lifetimes import Lifetimes
from rollover.track.trace import Trace
from rollover.track.tracker import Trackers
from rollover.trainer.batch import Batch, BatchBuilder
from rollover.trainer.distill import TeacherPrompts, teacher_prompts
from rollover.trainer.lora import load_with_adapter
from rollover.trainer.reuse import Reuse
from rollover.trainer.reward_kl import Penalties
from rollover.trainer.trainer import Trainer, build_trainer
from rollover.types import Group, Task
from rollover.workflows.build import build_episodes

logger = logging.getLogger(__name__)


class Model:
    """The model of a run, loaded at the first call."""

    def __init__(self, load: Callable[[], LoadedModel]) -> None:
        self._load = load
        self._loaded: LoadedModel | None = None

    def __call__(self) -> LoadedModel:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def reload(self) -> LoadedModel:
        """Load it again: a lost trainer backend has changed the weights of the earlier one."""
        self._loaded = None
        return self()


@dataclass
class KeptComponents:
    """Components that survive the loss of the trainer's backend; all others are rebuilt."""

    model: Model
    cluster: Cluster
    engine: Engine
    observed: RewardObserver[ScoringPool]

    @classmethod
    async def build(cls, config: Config, device: torch.device, logs: Path | None) -> KeptComponents:
        """Start the engine. ValueError: see `open_cluster` and `build_engine`."""
        model = Model(
            lambda: (
                load_model(config.model, device=device) if needs_weights_here(config) else load_outline(config.model)
            )
        )
        # The engine first: a remote one loads the model in parallel, and a local one copies the weights before the
        # trainer casts them or adds adapters.
        cluster, threads = open_cluster(ClusterSetup(config, logs)), most_threads(config)
        async with AsyncExitStack() as on_error:
            on_error.push_async_callback(cluster.close)
            engine = build_engine(
                EngineSetup(config, model, threads, logs=logs, make_server_host=cluster.make_server_host)
            )
            observed = build_rewarder(config, training=True, pool=cluster.reward_pool())
            on_error.pop_all()
        return cls(model, cluster, engine, observed)

    async def close(self) -> None:
        """End the engine, the reward workers and the cluster, each even if another fails."""
        async with AsyncExitStack() as rest:
            rest.push_async_callback(self.cluster.close)
            rest.push_async_callback(self.observed.rewarder.close)
            await self.engine.close()


@dataclass
class Components:
    """The components of a training run."""

    kept: KeptComponents
    is_restart: bool
    """Whether the run restarts after the loss of its backend, with `kept` of the earlier one."""
    loaded: LoadedModel
    trainer: Trainer
    lifecycle: Lifecycle
    prompts: PromptSource
    engine: Engine
    rewarder: ScoringPool
    observed: RewardObserver
    """Scores, over `rewarder`."""
    environment: RunEnvironment
    """The environment of training and evaluations; it gets scores from `observed`."""
    driver: Driver
    stop_token_ids: frozenset[int]
    batches: BatchBuilder
    """Builds the batch of each step from its groups."""
    reuse: Reuse
    trace: Trace
    lifetimes: Lifetimes
    examples: Examples | None = None
    """The examples of a supervised run."""

    @classmethod
    async def build(
        cls,
        config: Config,
        trace: Trace | None = None,
        logs: Path | None = None,
        kept: KeptComponents | None = None,
        on_abandon: Callable[[], None] | None = None,
    ) -> Components:
        """Load the model, start the engine, and build all components. A reward worker starts at its first call.

        `kept`: of the run whose backend was lost. The clock of `trace` continues now. `logs`: see EngineSetup and
        BackendSetup; `on_abandon`: see Driver.
        """
        prepare_process(config)
        torch.manual_seed(config.run.seed)
        # First come checks that fail at once for a wrong path, name or device: loading the model takes longer.
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
        is_restart = kept is not None
        async with AsyncExitStack() as on_error:  # an engine may be a process
            if kept is None:
                kept = await KeptComponents.build(config, devices[0], logs)
                on_error.push_async_callback(kept.close)
            loaded, engine, observed = kept.model.reload() if is_restart else kept.model(), kept.engine, kept.observed
            stops = stop_token_ids(loaded, config.rollout.stop_token_ids)
            examples = load_examples(config, loaded) if config.algorithm.supervised else None
            trainer = build_trainer(config, loaded, engine, logs, kept.cluster.make_ranks)
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
            requests = Requests(config.rollout, config.run.seed, stops, may_continue=environment.has_turns)
            driver = Driver(lifecycle, engine, reroll, environment, requests, watchdog, config.workflow, on_abandon)
            reuse = Reuse(config, reroll, prompts.curriculum)
            lifecycle.clock.resume()
            components = cls(
                kept=kept,
                is_restart=is_restart,
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
        return components

    def penalties(self, groups: list[Group], version: int) -> Penalties | None:
        """Return the KL penalties in the rewards of the step at trainer `version`; None without them."""
        reward_kl = self.trainer.reward_kl
        return None if reward_kl is None else reward_kl.penalties(self.batches.sampled(groups, version))

    def after_step(self, groups: list[Group], batch: Batch, version: int) -> None:
        """Record that the step at trainer `version` trained `batch`, which was built of `groups`."""
        self.reuse.after_step(groups, batch, version)
        self.lifecycle.clock.on_version(version + 1)

    async def close(self, *, keep: bool = False) -> None:
        """End rollouts in flight, the backend, the engine and the reward workers, each even if another fails.

        `keep`: the backend is lost; keep engine and reward workers.
        """
        async with AsyncExitStack() as components:
            if not keep:
                components.push_async_callback(self.kept.close)
            components.callback(self._close_lost_backend if keep else self.trainer.close)
            components.push_async_callback(self.environment.close)
            await self.driver.abandon()

    def _close_lost_backend(self) -> None:
        try:
            self.trainer.close()
        except Exception as error:  # boundary: a lost backend may raise anything
            logger.warning(f"the backend that is lost could not be closed ({error}): the run continues without it")


@dataclass
class EvalComponents:
    """The components of an evaluation or of sampling, without a trainer. `environment` and `rewarder` are None where
    nothing is scored."""

    config: Config
    tokenizer: Any
    engine: Engine
    environment: RunEnvironment | None
    rewarder: Rewarder | None
    stop_token_ids: frozenset[int]
    processor: Processor | None = None
    """None for a text model."""

    @classmethod
    async def build(cls, config: Config, model: str | None, *, with_rewards: bool = True) -> EvalComponents:
        """Load `model` (a folder or a name; None: model.path), and build the components."""
        check_is_here(config)
        prepare_process(config)
        other = {"path": model, "lora": LoraConfig()}
        model_config = config.model if model is None else config.model.model_copy(update=other)
        if is_tinker(config):
            config, loaded, adapter = _at_service(config, model), load_outline(config.model), []
        else:
            merges = config.engine.kind == "remote"
            loaded, adapter = load_with_adapter(
                model_config, dtype=dtype_of(config), device=engine_device(config), merges=merges
            )
            config = config.model_copy(update={"model": model_config})
        async with AsyncExitStack() as on_error:
            engine = build_engine(EngineSetup(config, lambda: loaded, most_threads(config), beside_trainer=False))
            on_error.push_async_callback(engine.close)
            if adapter:
                await engine.load_weights(0, adapter)
            environment = rewarder = None
            if with_rewards:
                rewarder = build_rewarder(config, training=False)
                environment = await start_environment(config, loaded, rewarder, engine, on_error)
            components = cls(
                config=config,
                tokenizer=loaded.tokenizer,
                engine=engine,
                environment=environment,
                rewarder=rewarder,
                stop_token_ids=stop_token_ids(loaded, []),
                processor=loaded.processor,
            )
            on_error.pop_all()
        return components

    async def __aenter__(self) -> EvalComponents:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        async with AsyncExitStack() as components:
            if self.rewarder is not None:
                components.push_async_callback(self.rewarder.close)
            components.push_async_callback(self.engine.close)
            if self.environment is not None:
                await self.environment.close()


def _at_service(config: Config, model: str | None) -> Config:
    """Return the configuration for sampling with `model` at the service; None: the base model."""
    if model is None:
        return config
    if not model.startswith("tinker://"):
        raise ValueError(
            f'{model!r} with backend.type = "tinker": the service samples. Give the path that it has the weights at'
            ' ("sampler" in tinker.json of the run\'s model folder), or remove the model: then it is the base model'
        )
    return config.model_copy(update={"backend": config.backend.model_copy(update={"base_model": model})})


async def start_environment(
    config: Config,
    loaded: LoadedModel,
    rewarder: RewardObserver,
    engine: Engine,
    on_error: AsyncExitStack,
    keep: Keep = keeps_nothing,
) -> RunEnvironment:
    """Build the environment, or the episodes of a workflow with their server, and wait until the engine is ready.

    `rewarder` scores rollouts, also those of agents that return no reward. `keep` stores values that must survive a
    kill. `on_error` gets the environment's `close`. ValueError where it cannot be used.
    """
    scorer = make_scorer(rewarder, loaded.tokenizer, config)
    singly = rewarder.rewarder.scores_singly
    setup = EnvironmentSetup(config, loaded.tokenizer, scorer, singly, loaded.vocab_size, loaded.processor)
    longest = await asyncio.to_thread(
        lambda: engine.max_tokens
    )  # in a thread: Ctrl-C can interrupt the wait for an engine
    if not config.workflow.agent:
        return build_environment(setup, keep)
    episodes = build_episodes(setup, longest, rewarder, keep)
    on_error.push_async_callback(episodes.close)
    await episodes.start()
    return episodes


_MOST_PROBED = 100  # tasks of a source, whose data_source may name different rewards


async def preflight(
    config: Config, rewarder: ScoringPool, trackers: Trackers, teacher_prompts: TeacherPrompts | None = None
) -> None:
    """Call each source's reward functions and distill.privileged once, and log a line about the tasks.

    RewardProbeError or FunctionError where one fails.
    """
    trackers.on_phase("checking the reward functions")
    notices: dict[str, None] = {}
    for source in config.tasks.sources:
        alone = config.tasks.model_copy(update={"sources": [source]})
        tasks = _one_of_each_reward(TaskStream(alone, config.run.seed, "train", rewards=config.rewards))
        for task in [] if config.workflow.agent else tasks:  # an agent returns the rewards itself
            await rewarder.probe(task)
            with contextlib.suppress(ValueError):  # another machine may have it: `probe` has checked that
                notices |= dict.fromkeys(statements(task.reward))
        if tasks and teacher_prompts is not None:
            teacher_prompts.encode_task(tasks[0])
    if config.rewards.eval_function and config.eval.num_tasks and not config.workflow.agent:
        stream = TaskStream(config.tasks, config.eval.seed, "eval", rewards=config.rewards)
        for task in stream.take(1):
            await rewarder.probe(task)
    for line in notices:
        logger.warning(line)
    trackers.on_phase("looking at the tasks")
    if line := tasks_line(config):
        logger.info(line)


def _one_of_each_reward(stream: TaskStream) -> list[Task]:
    """Return the first task, and with a data_source column the next tasks with other rewards."""
    found: dict[str, Task] = {}
    for task in itertools.islice(iter(stream.next, None), _MOST_PROBED):
        found.setdefault(task.reward, task)
        if "data_source" not in task.columns:
            break
    return list(found.values())


@dataclass(frozen=True, slots=True)
class RunContext:
    """The objects that the parts of one run share. Hooks, stop and restart budget outlive a lost backend."""

    config: Config
    components: Components
    directory: RunDirectory
    hooks: Hooks
    stop: Stop
    restart_budget: RestartBudget
    journal: Journal
    """The files of the event log (event_log.py)."""


class RestartBudget:
    """Limit of consecutive losses of the trainer's backend.

    `most`: cluster.max_restarts. Losses are consecutive if no new step is between them. A repeated step is not new: a
    backend that is lost at the same step each time would be restarted for ever. `total`: losses over all processes of
    the run; `in_a_row`: consecutive ones; `furthest`: number of the newest step, -1 before the first.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = self.in_a_row = 0
        self.furthest = -1

    def on_step(self, number: int) -> None:
        """Count step `number`."""
        if number > self.furthest:
            self.furthest, self.in_a_row = number, 0

    def on_loss(self) -> None:
        """Count a loss of the backend."""
        self.total += 1
        self.in_a_row += 1

    @property
    def is_exceeded(self) -> bool:
        """Whether the run ends with the last loss."""
        return self.in_a_row > self.most
