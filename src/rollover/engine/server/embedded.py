"""`rollover serve --engine embedded`: the embedded engine behind the endpoints, in this process alone.

Owns the process's way from the port to its end: SIGTERM and Ctrl-C end it in order; clients get what there is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
from safetensors.torch import load_file
from starlette.applications import Starlette

from rollover.config import Config
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.server.app import make_app
from rollover.engine.server.service import Service
from rollover.engine.server.texts import TextEndpoints
from rollover.http_guard import token
from rollover.http_server import HttpServer, end_of_service
from rollover.logs import terminal
from rollover.models.devices import dtype_of, engine_device
from rollover.models.load import load_model, stop_token_ids
from rollover.models.threads import prepare_process

_LAST_CHUNKS_S = 1.0
_BROKEN = 1  # the exit code


async def serve(config: Config, host: str, port: int, ready: Callable[[str], None]) -> int:
    """Serve until the process is told to end: 0 by SIGTERM, 130 by Ctrl-C. `ready` gets the URL when it answers.

    ValueError where the port cannot be had, or the model cannot be loaded.
    """
    parts: list[Starlette] = []  # when the model is loaded

    async def app(scope, receive, send) -> None:
        await parts[0](scope, receive, send)

    server = HttpServer(app, port, host, "--port", token=token())  # first: a port that is taken is told at once
    service = make_service(config)
    parts.append(make_app(service, TextEndpoints(service, service.tokenizer)))
    told = end_of_service()
    await server.start()
    ready(server.url)
    code = await told
    service.abort_all()
    await server.close(_LAST_CHUNKS_S)
    await service.engine.close()
    return code


def make_service(config: Config) -> Service:
    """The model of this configuration, on its engine's device. Its KV is dropped as clients ask, not as [rollout] says:
    they share or renew it by cache_salt and clear_cache."""
    prepare_process(config)
    loaded = load_model(config.model, dtype=dtype_of(config), device=engine_device(config))
    model_bytes = sum(weight.numel() * weight.element_size() for weight in loaded.model.parameters())
    rollout = config.rollout.model_copy(update={"kv_on_resume": "keep"})
    tokenizer = loaded.tokenizer
    engine = EmbeddedEngine.over(loaded.model, loaded, config.model_copy(update={"rollout": rollout}))
    return Service(
        engine,
        model_name=config.model.path,
        eos=stop_token_ids(loaded, []),
        tokenizer=tokenizer,
        load=_load,
        fail=_end_process,
        model_bytes=model_bytes,
        processor=loaded.processor,
    )


def _load(path: str) -> Mapping[str, torch.Tensor]:
    return load_file(path)


def _end_process(reason: str) -> None:
    """At once, whatever goes on: nothing may be sampled with half a model."""
    terminal.error(f"{reason}: the server ends")
    os._exit(_BROKEN)
