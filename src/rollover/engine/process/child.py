"""What runs in the engine process: one EmbeddedEngine for the parent, whose end of the channels is client.py."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from typing import Any

import torch

from rollover.config import Config
from rollover.config.table import UNSETTLED
from rollover.engine.build import embedded_engine
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.process.wire import Channel, requests_from_json, segment_to_json
from rollover.engine.protocol import ExtendRequest
from rollover.models.allocator import keep_few_shapes, keep_freed_memory
from rollover.models.devices import dtype_of, engine_device
from rollover.models.load import load_model
from rollover.weights.build import received


def main(control_fd: str) -> None:
    """Serve until the requests on the standard input end. `control_fd`: its end of the control channel, a number."""
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not be taken for a reply
    keep_freed_memory()
    keep_few_shapes()
    control = Channel(socket.socket(fileno=int(control_fd)))
    first = control.receive()
    torch.set_num_threads(first["threads"])
    config = Config.model_validate(first["config"], context=UNSETTLED)  # it was checked where it was made
    loaded = load_model(config.model, dtype=dtype_of(config), device=engine_device(config))
    for parameter in loaded.model.parameters():
        # Aligned as the trainer's process has them: from a mapped file they are not, and some matmuls then round
        # otherwise.
        parameter.data = parameter.data.clone()
    engine = embedded_engine(loaded, config, copies=False)
    hello = {
        "max_tokens": engine.max_tokens,
        "kv_bytes_per_token": engine.kv_bytes_per_token,
        "weight_bytes": [p.nbytes for p in loaded.model.parameters()],
        "stats": engine.stats(),
    }
    control.send(hello)
    asyncio.run(_Worker(engine, control, replies).serve())


class _Worker:
    def __init__(self, engine: EmbeddedEngine, control: Channel, replies: int) -> None:
        self.engine, self.control, self.replies_fd = engine, control, replies
        self.running: dict[int, asyncio.Task[None]] = {}
        self.rollout_ids: dict[int, str] = {}  # of the calls that run

    async def serve(self) -> None:
        """Answer until the requests end."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.control, self._receive)
        requests = asyncio.StreamReader(limit=2**30)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), os.fdopen(0, "rb"))
        # A writer that buffers: a parent that waits for an answer on the other channel reads no replies meanwhile.
        transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(self.replies_fd, "wb"))
        self.replies = transport
        while line := await requests.readline():
            message = json.loads(line)
            match message["op"]:
                case "extend":
                    for call, request in requests_from_json(message).items():
                        self.rollout_ids[call] = request.rollout_id
                        self.running[call] = asyncio.create_task(self._extend(call, request))
                    await asyncio.sleep(0)  # they begin: an interruption that comes next must reach them
                case "cancel":
                    if message["call"] in self.running:
                        self.running[message["call"]].cancel()
                case "interrupt":
                    self.engine.interrupt(message["ids"])
                case "release":
                    self.engine.release(message["ids"])
                case "threads":
                    self.engine.use_threads(message["num"])
        await self.engine.close()

    async def _extend(self, call: int, request: ExtendRequest) -> None:
        try:
            segments = await self.engine.extend(request)
            reply = {"call": call, "segments": [segment_to_json(s) for s in segments]}
        except Exception as error:  # boundary: it is raised in the parent
            reply = {"call": call, "error": str(error), "user": isinstance(error, ValueError)}
        finally:
            del self.running[call], self.rollout_ids[call]
        self.replies.write(json.dumps(reply | {"stats": self.engine.stats()}).encode() + b"\n")

    def _receive(self) -> None:
        """Begin to answer the question that has come. There is one at a time: the next is asked when it is answered."""
        while True:
            try:
                message = self.control.receive()
            except ConnectionError:
                sys.exit(0)
            self.answering = asyncio.create_task(self._answer(message))
            if not self.control.pending:
                return

    async def _answer(self, message: dict[str, Any]) -> None:
        try:
            answer = await self._answer_to(message)
        except Exception as error:  # boundary: it is raised in the parent, which waits for an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.control.send(answer | {"id": message["id"]})

    async def _answer_to(self, message: dict[str, Any]) -> dict[str, Any]:
        match message["op"]:
            case "load":
                weights = received(message["parcel"], self.control.take_file())
                await self.engine.load_weights(message["parcel"]["version"], weights)
            case "progress":
                ids = self._ids(message["calls"])
                found = await self.engine.progress(ids.values())
                calls = [n for n, rollout_id in ids.items() if rollout_id in found]
                return {"calls": [(n, [segment_to_json(s) for s in found[ids[n]]]) for n in calls]}
            case "queued":
                ids = self._ids(message["calls"])
                queued = await self.engine.queued(ids.values())
                return {"calls": [(n, []) for n, rollout_id in ids.items() if rollout_id in queued]}
        return {}

    def _ids(self, calls: list[int]) -> dict[int, str]:
        """Of these calls those that run here: rollout id by number of call."""
        return {number: self.rollout_ids[number] for number in calls if number in self.rollout_ids}
