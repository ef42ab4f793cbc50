"""The engine process: `python -m rollover.engine.process_worker PARENT_PID CONTROL_FD WEIGHTS_FD`.

Runs one EmbeddedEngine for its parent (engine/process.py, which describes the three channels). Dies with its parent.
"""

from __future__ import annotations

import asyncio
import json
import math
import mmap
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import torch

from rollover.config import Config
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.wire import request_from_json, segment_to_json
from rollover.models.allocator import keep_freed_memory
from rollover.models.load import load_model, pick_device
from rollover.processes import die_with


def main() -> None:
    parent, control_fd, weights_fd = (int(word) for word in sys.argv[1:4])
    die_with(parent)
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not be taken for a reply
    keep_freed_memory()
    control = socket.socket(fileno=control_fd)
    reader = control.makefile("r", encoding="utf-8")
    first = json.loads(reader.readline())
    torch.set_num_threads(first["threads"])
    config = Config.model_validate(first["config"])
    loaded = load_model(config.model, dtype=getattr(torch, config.model.dtype), device=pick_device(config.model.device))
    for parameter in loaded.model.parameters():
        # Aligned as the trainer's process has them: from a mapped file they are not, and some matmuls then round
        # otherwise.
        parameter.data = parameter.data.clone()
    engine = EmbeddedEngine.over(loaded.model, loaded.tokenizer, config)
    _answer(control, {"max_tokens": engine.max_tokens, "kv_bytes_per_token": engine.kv_bytes_per_token})
    asyncio.run(_Worker(engine, control, reader, weights_fd, replies).serve())


class _Worker:
    def __init__(self, engine: EmbeddedEngine, control: socket.socket, reader: Any, weights_fd: int, replies: int):
        self.engine, self.control, self.reader, self.weights_fd = engine, control, reader, weights_fd
        self.replies_fd = replies
        self.running: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Answer until the requests end."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.control, self._control)
        requests = asyncio.StreamReader(limit=2**30)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), os.fdopen(0, "rb"))
        # A writer that buffers: a parent that waits for an answer on the other channel reads no replies meanwhile.
        transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(self.replies_fd, "wb"))
        self.replies = transport
        while line := await requests.readline():
            message = json.loads(line)
            match message["op"]:
                case "extend":
                    for call in message["calls"]:
                        self.running[call["call"]] = asyncio.create_task(self._extend(call))
                    await asyncio.sleep(0)  # they begin: an interruption that comes next must reach them
                case "cancel":
                    if message["call"] in self.running:
                        self.running[message["call"]].cancel()
                case "interrupt":
                    self.engine.interrupt(message["ids"])
                case "release":
                    self.engine.release(message["ids"])
        await self.engine.close()

    async def _extend(self, message: dict[str, Any]) -> None:
        call = message["call"]
        try:
            segments = await self.engine.extend(request_from_json(message["request"]))
            reply = {"call": call, "segments": [segment_to_json(s) for s in segments]}
        except Exception as error:  # boundary: it is raised in the parent
            reply = {"call": call, "error": str(error), "user": isinstance(error, ValueError)}
        finally:
            del self.running[call]
        self.replies.write(json.dumps(reply | {"stats": self.engine.stats()}).encode() + b"\n")

    def _control(self) -> None:
        line = self.reader.readline()
        if not line:
            sys.exit(0)
        try:
            answer = self._answer_to(json.loads(line))
        except Exception as error:  # boundary: it is raised in the parent, which waits for an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        _answer(self.control, answer)

    def _answer_to(self, message: dict[str, Any]) -> dict[str, Any]:
        match message["op"]:
            case "load":
                self.engine.load_weights(message["version"], self._tensors(message["tensors"]))
            case "threads":
                self.engine.use_threads(message["num"])
            case "progress":
                found = self.engine.progress(message["ids"])
                return {i: [segment_to_json(s) for s in segments] for i, segments in found.items()}
            case "queued":
                return {"ids": sorted(self.engine.queued(message["ids"]))}
            case "stats":
                return self.engine.stats()
        return {}

    def _tensors(self, table: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the shared memory, by (name, dtype, shape, offset)."""
        memory = mmap.mmap(self.weights_fd, 0, access=mmap.ACCESS_COPY)  # unmapped with its last view
        for name, dtype, shape, offset in table:
            count = math.prod(shape)
            yield name, torch.frombuffer(memory, dtype=getattr(torch, dtype), count=count, offset=offset).view(shape)


def _answer(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
