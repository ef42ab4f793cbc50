"""The engine of a run, by engine.kind: a built-in one, or a function of the user's own that makes one.

Training, evaluation, sampling and the engine's own process all get theirs here. Owns what an engine is made from. Never
runs it.
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
from rollover.weights.protocol import NamedTensors


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is made from.

    `model()` loads the model at its first call and returns the same one afterwards; an engine that loads its own does
    not call it. `beside_trainer`: whether a trainer goes on with that model, so that the engine needs a copy.
    `threads`: the CPU threads that it may use at first. `logs`: the folder of what its processes print; None: it has
    none that stays.
    """

    config: Config
    model: Callable[[], LoadedModel]
    threads: int
    beside_trainer: bool = True
    logs: Path | None = None
    own_server: Callable[[int], ServerHost] | None = None
    """Of the servers that the run starts: makes each by its number; None: processes of this machine."""


def build_engine(setup: EngineSetup) -> Engine:
    """The engine that engine.kind names, or the service's. ValueError if a function of one's own gives none."""
    if is_tinker(setup.config):
        return registry.load("engines", "tinker")(setup)
    kind = setup.config.engine.kind
    made = make_named("engine.kind", kind, ENGINES, setup, Engine, "an engine")
    if kind in ENGINES:
        return made
    newest_version = 0 if setup.beside_trainer else math.inf
    return CustomEngine(made, kind, functools.cache(lambda: setup.model().vocab_size), newest_version)


def embedded_engine(loaded: LoadedModel, config: Config, *, copies: bool = True) -> EmbeddedEngine:
    """An embedded engine over the weights of `loaded`, or a copy, in compute dtype and on the engine's device."""
    model = copy.deepcopy(loaded.model) if copies else loaded.model
    cast_parameters(model, dtype_of(config))
    torch.nn.Module.to(model, engine_device(config))
    return EmbeddedEngine.over(model, loaded, config)


def make_embedded(setup: EngineSetup) -> Engine:
    """An engine in this process."""
    return embedded_engine(setup.model(), setup.config, copies=setup.beside_trainer)


def make_process(setup: EngineSetup) -> Engine:
    """An engine in a process of its own; without a trainer to work beside, an embedded one without a process."""
    return ProcessEngine(setup.config, setup.threads) if setup.beside_trainer else make_embedded(setup)


def make_remote(setup: EngineSetup) -> RemoteEngine:
    """An engine over servers: of engine.urls, and of our own. Errors as of `RemoteEngine`."""

    def initial() -> Iterator[tuple[str, torch.Tensor]]:
        model = setup.model().model
        if next(model.parameters()).is_meta:  # others train it: the weights are here for this alone
            model = load_model(setup.config.model).model
        yield from base_weights(model)  # adapters that a trainer has given it begin with nothing

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
            own_server=setup.own_server,
        )
    )
