"""Construction of the engine that engine.kind names: a built-in one, or a custom function's.

Used by training, evaluation, sampling and the engine process. Never runs the engine.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rollover import registry
from rollover.config import Config
from rollover.config.backend import is_tinker
from rollover.config.train import ENGINES
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.process.engine import ProcessEngine
from rollover.engine.protocol import Engine
from rollover.engine.remote.engine import RemoteEngine, RemoteSetup
from rollover.engine.remote.hosts import ServerHost
from rollover.engine.validate import CustomEngine
from rollover.functions import make_named
from rollover.models.adapters import base_weights
from rollover.models.devices import dtype_of, engine_device
from rollover.models.load import LoadedModel, as_in_files, cast_parameters, load_model
from rollover.models.vision import placeholder_ids
from rollover.weights import NamedTensors


@dataclass(frozen=True)
class EngineSetup:
    """Arguments of an engine's constructor.

    `model()` loads the model at its first call, and returns the same one afterwards; an engine that loads its own does
    not call it. `beside_trainer`: a trainer uses that model, so that the engine needs a copy. `threads`: CPU threads at
    first. `logs`: folder for the output of its processes; None: a temporary one.
    """

    config: Config
    model: Callable[[], LoadedModel]
    threads: int
    beside_trainer: bool = True
    logs: Path | None = None
    make_server_host: Callable[[int], ServerHost] | None = None
    """Creates server number n of those that the run starts; None: processes of this machine."""


def build_engine(setup: EngineSetup) -> Engine:
    """Return the engine that engine.kind names, or the service's. Raises ValueError if it returns none."""
    if is_tinker(setup.config):
        return registry.load("engines", "tinker")(setup)
    kind = setup.config.engine.kind
    made = make_named("engine.kind", kind, ENGINES, setup, Engine, "an engine")
    if kind in ENGINES:
        return made
    newest_version = 0 if setup.beside_trainer else math.inf
    return CustomEngine(made, kind, functools.cache(lambda: setup.model().vocab_size), newest_version)


def embedded_engine(loaded: LoadedModel, config: Config, *, copies: bool = True) -> EmbeddedEngine:
    """Return an embedded engine over the weights of `loaded`, or a copy, in compute dtype and on its device."""
    model = copy.deepcopy(loaded.model) if copies else loaded.model
    cast_parameters(model, dtype_of(config))
    torch.nn.Module.to(model, engine_device(config))
    return EmbeddedEngine.over(model, loaded, config)


def make_embedded(setup: EngineSetup) -> Engine:
    """Return an engine in this process."""
    return embedded_engine(setup.model(), setup.config, copies=setup.beside_trainer)


def make_process(setup: EngineSetup) -> Engine:
    """Return an engine in a child process; without a trainer beside it, an embedded one."""
    return ProcessEngine(setup.config, setup.threads) if setup.beside_trainer else make_embedded(setup)


def make_remote(setup: EngineSetup) -> RemoteEngine:
    """Return an engine over servers: those of engine.urls, and those that the run starts. Raises as `RemoteEngine`."""

    def initial() -> Iterator[tuple[str, torch.Tensor]]:
        model = setup.model().model
        if next(model.parameters()).is_meta:  # trained elsewhere: the weights are loaded only for the servers
            model = load_model(setup.config.model).model
        yield from base_weights(model)  # without the trainer's adapters, which begin at zero

    def in_files(tensors: NamedTensors) -> NamedTensors:
        return as_in_files(setup.model().model, tensors)

    return RemoteEngine(
        RemoteSetup(
            setup.config,
            initial=initial,
            names=in_files if setup.config.engine.server == "vllm" else lambda tensors: tensors,
            decode_text=lambda ids: setup.model().tokenizer.decode(ids, skip_special_tokens=False),
            vocab_size=lambda: setup.model().vocab_size,
            placeholders=lambda: placeholder_ids(setup.model().model.config),
            logs=setup.logs,
            make_server_host=setup.make_server_host,
        )
    )
