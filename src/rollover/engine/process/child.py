"""Main function of the engine process: one EmbeddedEngine for the parent (engine.py has its end of the socket)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any

import torch

from rollover.config import Config
from rollover.config.table import UNSETTLED
from rollover.engine.build import embedded_engine
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.process.engine import requests_from_json, segments_to_json
from rollover.models.allocator import keep_few_shapes, keep_freed_memory
from rollover.models.devices import dtype_of, engine_device
from rollover.models.load import load_model
from rollover.weights.shared_file import SharedFile
from rollover.workers.child import Calls


def main() -> None:
    """Serve the parent until it closes the connection."""
    calls = Calls()
    keep_freed_memory()
    keep_few_shapes()
    asyncio.run(_serve(calls))


async def _serve(calls: Calls) -> None:
    received = iter(calls)
    first = next(received)
    torch.set_num_threads(first["threads"])
    config = Config.model_validate(first["config"], context=UNSETTLED)  # the parent has checked it
    loaded = load_model(config.model, dtype=dtype_of(config), device=engine_device(config))
    for parameter in loaded.model.parameters():
        # Align as in the trainer's process: mapped files are not aligned, and some matmuls then round differently.
        parameter.data = parameter.data.clone()
    engine = embedded_engine(loaded, config, copies=False)
    calls.reply(
        max_tokens=engine.max_tokens,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        weight_bytes=[p.nbytes for p in loaded.model.parameters()],
        stats=engine.stats(),
    )
    loop = asyncio.get_running_loop()
    messages: asyncio.Queue[tuple[int, dict[str, Any]] | None] = asyncio.Queue()

    def receive() -> None:
        for message in received:
            loop.call_soon_threadsafe(messages.put_nowait, (calls.call, message))
        loop.call_soon_threadsafe(messages.put_nowait, None)

    threading.Thread(target=receive, daemon=True).start()
    worker = _Worker(engine, calls)
    while (message := await messages.get()) is not None:
        await worker.take(message[0], **message[1])
    await engine.close()


class _Worker:
    def __init__(self, engine: EmbeddedEngine, calls: Calls) -> None:
        self.engine, self.calls = engine, calls
        self.extends: dict[int, asyncio.Task[None]] = {}

    async def take(self, call: int, op: str, value: Any) -> None:
        """Handle one message. An `extend` continues in a task."""
        match op:
            case "extend":
                for number, request in requests_from_json(value).items():
                    self.extends[number] = asyncio.create_task(
                        self._reply(call, self._segments(request), extend=number)
                    )
                    self.extends[number].add_done_callback(lambda _, number=number: self.extends.pop(number))
                await asyncio.sleep(0)  # let them begin: an interruption that comes next must reach them
            case "cancel" if value in self.extends:
                self.extends[value].cancel()
            case "interrupt" | "release" | "use_threads":
                getattr(self.engine, op)(value)
            case "load_weights" | "progress" | "queued":
                await self._reply(call, getattr(self, f"_{op}")(value))

    async def _reply(self, call: int, value: Awaitable[Any], **about: Any) -> None:
        try:
            reply = {"value": await value}
        except ValueError as error:
            reply = {"error": str(error), "user": True}
        except Exception as error:  # boundary: raised in the parent
            reply = {"error": f"{type(error).__name__}: {error}", "user": False}
        self.calls.reply_to(call, **about, **reply, stats=self.engine.stats())

    async def _segments(self, request: Any) -> list[Any]:
        return segments_to_json(await self.engine.extend(request))

    async def _load_weights(self, message: dict[str, Any]) -> None:
        await self.engine.load_weights(message["version"], SharedFile.read(message))

    async def _progress(self, ids: list[str]) -> dict[str, list[Any]]:
        return {rollout_id: segments_to_json(of) for rollout_id, of in (await self.engine.progress(ids)).items()}

    async def _queued(self, ids: list[str]) -> dict[str, None]:
        return dict.fromkeys(await self.engine.queued(ids))
