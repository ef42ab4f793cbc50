"""Builds the parts of a run from its configuration. Owns nothing afterwards: the loop does."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollover.algorithms.filters import first_match, group_filters
from rollover.config import Config, ModelConfig
from rollover.engine.build import EngineSetup, build_engine
from rollover.engine.protocol import Engine
from rollover.functions import own_function
from rollover.models import kernels
from rollover.models.devices import dtype_of, engine_device, pick_device
from rollover.models.load import (
    LoadedModel,
    load_model,
    stop_token_ids,
)
from rollover.models.team import Team, most_threads, prepare_process
from rollover.rewards.build import build_rewarder
from rollover.rewards.observer import RewardObserver
from rollover.rewards.pool import RewardPool
from rollover.rewards.protocol import Rewarder
from rollover.rewards.scorer import make_scorer
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Lifecycle
from rollover.rollout.watchdog import Watchdog
from rollover.tasks.prompts import TASK_OR_NONE, PromptSource
from rollover.tasks.report import tasks_line
from rollover.tasks.reroll import Reroll
from rollover.tasks.stream import TaskStream
from rollover.track.history import RunHistory
from rollover.track.live import LiveView
from rollover.track.trace import TraceFile
from rollover.trainer.lora import ADAPTER, read_adapter
from rollover.trainer.reuse import Reuse
from rollover.trainer.trainer import Trainer
from rollover.types import Task


def prompt_limit(config: Config, engine: Engine) -> int:
    """The longest prompt: tasks.max_prompt_tokens, or what a rollout's budget leaves of what the engine can hold."""
    left = engine.max_tokens - config.rollout.max_new_tokens
    if left < 1:
        raise ValueError(
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens} leaves no room for a prompt: the model's"
            f" positions and engine.kv_memory_gb allow rollouts of {engine.max_tokens} tokens. Lower it"
        )
    return min(config.tasks.max_prompt_tokens, left)


def held_out_tasks(config: Config, say: Callable[[str], None]) -> list[Task]:
    """The run's held-out tasks: the same ones at every evaluation. `say` is told what is left out."""
    stream = TaskStream(config.tasks, seed=config.eval.seed, split="eval", rewards=config.rewards)
    stream.say = say
    return stream.take(config.eval.num_tasks)


async def look_at_tasks(config: Config, rewarder: RewardPool, view: LiveView) -> None:
    """Call every source's reward function once, and say what the tasks are. RewardProbeError names what is wrong."""
    view.phase("checking the reward functions")
    for source in config.tasks.sources:
        alone = config.tasks.model_copy(update={"sources": [source]})
        task = TaskStream(alone, seed=config.run.seed, split="train", rewards=config.rewards).next()
        if task is not None:
            await rewarder.probe(task)
    view.phase("looking at the tasks")
    if line := tasks_line(config):
        view.message(line)


@dataclass
class EvalParts:
    """What evaluation and sampling need."""

    config: Config
    tokenizer: Any
    engine: Engine
    rewarder: Rewarder | None
    stop_token_ids: frozenset[int]

    @classmethod
    async def build(cls, config: Config, model: str | None, *, with_rewards: bool = True) -> EvalParts:
        prepare_process(config)
        model_config = config.model if model is None else config.model.model_copy(update={"path": model})
        loaded, adapter = _with_adapter(model_config, dtype_of(config), engine_device(config))
        config = config.model_copy(update={"model": model_config})
        engine = build_engine(EngineSetup(config, lambda: loaded, most_threads(config), beside_trainer=False))
        if adapter:
            await engine.load_weights(0, adapter)
        return cls(
            config=config,
            tokenizer=loaded.tokenizer,
            engine=engine,
            rewarder=build_rewarder(config, training=False) if with_rewards else None,
            stop_token_ids=stop_token_ids(loaded, []),
        )

    async def close(self) -> None:
        await self.engine.close()
        if self.rewarder is not None:
            await self.rewarder.close()


def _with_adapter(
    model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[LoadedModel, list[tuple[str, torch.Tensor]]]:
    """The model, and adapters for it to be served beside its weights: of a folder that a run with LoRA saved the model
    without them, since merging has rounded small updates away."""
    folder = Path(model.path).expanduser() / ADAPTER
    if not (folder / "adapter_config.json").is_file():
        return load_model(model, dtype=dtype, device=device), []
    base, adapter = read_adapter(folder)
    plain = model.model_copy(update={"path": base, "revision": ""})
    try:
        loaded = load_model(plain, dtype=dtype, device=device)
    except ValueError as error:
        what = f"the merged weights are used, in which small updates are rounded away: {error}"
        loaded, adapter = load_model(model, dtype=dtype, device=device), []
    else:
        what = f"its adapters are used over {base}: merged, small updates are rounded away"
    print(f"rollover: notice: {model.path}: {what}", file=sys.stderr)
    return loaded, adapter


@dataclass
class Parts:
    """Everything a training run is made of, but for what is written to its directory."""

    loaded: LoadedModel
    trainer: Trainer
    lifecycle: Lifecycle
    prompts: PromptSource
    engine: Engine
    rewarder: RewardPool
    observed: RewardObserver  # over `rewarder`: what scores
    driver: Driver
    stop_token_ids: frozenset[int]
    reuse: Reuse
    history: RunHistory

    @classmethod
    def build(
        cls, config: Config, say: Callable[[str], None] = lambda text: None, trace: TraceFile | None = None
    ) -> Parts:
        """Loads the model and starts nothing: a reward worker starts at its first call. `say` prints the lines of all
        of them; without a file the `trace` stays in memory."""
        prepare_process(config)
        torch.manual_seed(config.run.seed)
        # What a wrong path, name or device ends comes before the model, which takes longer.
        device = pick_device(config.model.device)
        for reason in {kernels.why_not(kind.type) for kind in (device, engine_device(config))} - {""}:
            say(reason)
        stream = TaskStream(config.tasks, seed=config.run.seed, split="train", rewards=config.rewards)
        name = config.tasks.before_produce
        before_produce = own_function("tasks.before_produce", name, TASK_OR_NONE) if name else None
        filters = group_filters(config.filters)
        model = functools.cache(lambda: load_model(config.model, device=device))
        # First: one elsewhere loads the model while we do, and one here copies the weights before the trainer casts
        # them or adds adapters.
        engine = build_engine(EngineSetup(config, model, most_threads(config)))
        loaded = model()
        stops = stop_token_ids(loaded, config.rollout.stop_token_ids)
        trainer = Trainer(
            loaded,
            config.train,
            config.algorithm,
            dtype=dtype_of(config),
            max_new_tokens=config.rollout.max_new_tokens,
            max_staleness=max(config.staleness_bound, config.replay.max_staleness if config.replay.size else 0),
            lora=config.model.lora,
            team=Team.of(config.run, device),
        )
        prompts = PromptSource(stream, loaded.tokenizer, prompt_limit(config, engine), before_produce)
        observed = build_rewarder(config, training=True)
        rewarder = observed.rewarder
        lifecycle = Lifecycle(
            config.rollout,
            config.engine.max_running,
            config.rewards.min_valid,
            group_filter=(lambda group: first_match(group, filters)) if filters else None,
            max_filtered_steps=config.filters.give_up_after_steps,
        )
        scorer = make_scorer(observed, loaded.tokenizer, config.rewards.repetition_penalty)
        watchdog = Watchdog(config.watchdog, config.rewards.allowed_s(config.rollout.rollouts_per_group))
        reroll = Reroll(config.reroll, config.train.num_steps, prompts)
        driver = Driver(lifecycle, engine, reroll, scorer, config.run.seed, stops, watchdog, rewarder.scores_singly)
        driver.say = observed.say = stream.say = say
        reuse, history = Reuse(config, reroll), RunHistory(trace)
        return cls(loaded, trainer, lifecycle, prompts, engine, rewarder, observed, driver, stops, reuse, history)

    async def close(self) -> None:
        await self.driver.abandon()
        await self.engine.close()
        await self.rewarder.close()
