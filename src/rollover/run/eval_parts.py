"""What evaluation and sampling are made of, where there is no trainer. Owns nothing afterwards: its user does."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from rollover.config import Config, LoraConfig
from rollover.config.backend import is_tinker
from rollover.config.cluster import check_is_here
from rollover.engine.build import EngineSetup, build_engine
from rollover.engine.protocol import Engine
from rollover.envs.protocol import RunEnvironment
from rollover.models.devices import dtype_of, engine_device
from rollover.models.load import load_outline, stop_token_ids
from rollover.models.processor import Processor
from rollover.models.threads import most_threads, prepare_process
from rollover.rewards.protocol import Rewarder
from rollover.rewards.scorer import build_rewarder
from rollover.run.environment import start_environment
from rollover.trainer.lora import load_with_adapter


@dataclass
class EvalParts:
    """`environment`, and the `rewarder` that it asks, are None where nothing is scored. `close` ends all of them."""

    config: Config
    tokenizer: Any
    engine: Engine
    environment: RunEnvironment | None
    rewarder: Rewarder | None
    stop_token_ids: frozenset[int]
    processor: Processor | None = None
    """None for a text model."""

    @classmethod
    async def build(cls, config: Config, model: str | None, *, with_rewards: bool = True) -> EvalParts:
        """Load `model` (a folder or a name; None: model.path), and build what answers with it."""
        check_is_here(config)
        prepare_process(config)
        of_another = {"path": model, "lora": LoraConfig()}
        model_config = config.model if model is None else config.model.model_copy(update=of_another)
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
            parts = cls(
                config=config,
                tokenizer=loaded.tokenizer,
                engine=engine,
                environment=environment,
                rewarder=rewarder,
                stop_token_ids=stop_token_ids(loaded, []),
                processor=loaded.processor,
            )
            on_error.pop_all()
        return parts

    async def __aenter__(self) -> EvalParts:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        async with AsyncExitStack() as parts:
            if self.rewarder is not None:
                parts.push_async_callback(self.rewarder.close)
            parts.push_async_callback(self.engine.close)
            if self.environment is not None:
                await self.environment.close()


def _at_service(config: Config, model: str | None) -> Config:
    """The configuration with which the service samples with `model`: a path of its own, or None, the base model."""
    if model is None:
        return config
    if not model.startswith("tinker://"):
        raise ValueError(
            f'{model!r} with backend.type = "tinker": the service samples. Give the path that it has the weights at'
            ' ("sampler" in tinker.json of the run\'s model folder), or remove the model: then it is the base model'
        )
    return config.model_copy(update={"backend": config.backend.model_copy(update={"base_model": model})})
