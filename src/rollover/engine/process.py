"""An embedded engine in a process of its own, beside the trainer. No torch is run here but to read weights.

    requests   pipe, JSON lines    extend, cancel, interrupt, release    written and read without blocking
    replies    pipe, JSON lines    what an extend returned, and counters
    control    socket, JSON lines  load, threads, progress, queued, stats: each is answered, and waited for
    weights    a file in memory    tensors at fixed offsets, copied once into it and once out of it; nothing is pickled

Owns the process, the file and the calls under way. A process that dies is started again with the last weights, and
what it was asked is asked again: a rollout loses the tokens of its current `extend`, nothing else. One that hangs,
so that it does not answer on control within watchdog.rollout_timeout_s, is killed first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rollover.config import Config
from rollover.engine.protocol import ExtendRequest, WeightLoad
from rollover.engine.wire import request_to_json, segment_from_json
from rollover.processes import child_command, child_environment
from rollover.types import Segment

if TYPE_CHECKING:
    import torch

_MAX_RESTARTS = 3  # without a finished extend in between
_ALIGNMENT = 64


class EngineDied(RuntimeError):
    """The engine's process ended again and again."""


class ProcessEngine:
    """The Engine contract, and `max_tokens`, `kv_bytes_per_token`, `use_threads` of the embedded engine.

    `threads`: of the process at its start. `say` prints a line when the process had to be started again.
    """

    def __init__(self, config: Config, threads: int, say: Callable[[str], None] | None = None) -> None:
        self.config, self.threads = config, threads
        self.say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self.policy_version = 0
        self.num_restarts = 0
        self._failures = 0
        self._closing = False
        self._calls: dict[int, tuple[ExtendRequest, asyncio.Future[list[Segment]]]] = {}
        self._next_call = 0
        self._unsent: list[dict[str, Any]] = []
        self._opening: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._table: dict[str, tuple[str, list[int], int]] = {}  # name -> dtype, shape, offset in the file
        self._num_bytes = 0
        self._last: dict[str, Any] = {}  # answers by question
        self._stats: dict[str, float] = {}
        self._before: dict[str, float] = {}  # counters of the processes that died
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._weights = tempfile.TemporaryFile(dir=memory)  # has no name: it vanishes with its last process
        self._hello_lock = threading.Lock()
        self._spawn()

    # The process

    def _spawn(self) -> None:
        """Start it. It loads the model while we do other things; `_hello` waits for it."""
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), self._weights.fileno())
        self._process = subprocess.Popen(
            child_command("rollover.engine.process_worker", *fds),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C is for the loop
        )
        theirs.close()
        self._control, self._answers = ours, ours.makefile("rb")
        first = {"config": self.config.model_dump(mode="json"), "threads": self.threads}
        self._control.sendall(json.dumps(first).encode() + b"\n")
        self._ready: dict[str, int] | None = None

    def _hello(self) -> dict[str, int]:
        """Wait until the model is loaded."""
        with self._hello_lock:
            if self._ready is None:
                line = self._answers.readline()
                if not line:
                    code = self._process.wait()
                    raise EngineDied(f"the engine process ended while it was loading the model (exit code {code})")
                self._ready = json.loads(line)
            assert self._ready is not None
            return self._ready

    async def _connect(self) -> None:
        """Open the pipes, once: whoever comes meanwhile waits for the same opening."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        await asyncio.shield(self._opening)

    async def _open(self, *, again: bool = False) -> None:
        """`again`: the process was started again, and nothing may be sampled under the weights that it has loaded."""
        await asyncio.to_thread(self._hello)
        if again and self._table:
            self._load(self.policy_version, list(self._table))
        loop = asyncio.get_running_loop()
        replies = asyncio.StreamReader(limit=2**30)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(replies), self._process.stdout)
        self._writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._process.stdin)
        self._reader = asyncio.ensure_future(self._read(replies))

    async def _read(self, replies: asyncio.StreamReader) -> None:
        while (line := await replies.readline()).endswith(b"\n"):
            reply = json.loads(line)
            self._stats = reply["stats"]
            self._failures = 0
            _, future = self._calls.pop(reply["call"], (None, None))
            if future is None or future.done():
                continue
            if "segments" in reply:
                future.set_result([segment_from_json(s) for s in reply["segments"]])
            else:
                future.set_exception((ValueError if reply["user"] else RuntimeError)(reply["error"]))
        if not self._closing:
            await self._restart()

    async def _restart(self) -> None:
        """The process died: start it again, give it the last weights and ask again what it was asked."""
        code = self._process.wait()
        self._drop_process()
        self._failures += 1
        self.num_restarts += 1
        self._before, self._stats = self._counters(), {}
        try:
            if self._failures > _MAX_RESTARTS:
                raise EngineDied(f"the engine process died {self._failures} times in a row (exit code {code})")
            self.say(
                f"the engine process died (exit code {code}): it is started again, and {len(self._calls)} rollouts"
                " go on from their last segment"
            )
            lost = list(self._calls.items())  # what is asked from now on waits for the new process by itself
            self._spawn()
            self._opening = asyncio.ensure_future(self._open(again=True))
            await self._connect()
            for call, (request, _) in lost:
                if call in self._calls:
                    self._send_extend(call, request)
        except Exception as error:
            calls, self._calls = self._calls, {}
            for _, future in calls.values():
                if not future.done():
                    future.set_exception(error)

    def _drop_process(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._opening, self._reader, self._writer = None, None, None
        self._answers.close()
        self._control.close()

    # Channels

    def _send(self, message: dict[str, Any]) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    def _send_extend(self, call: int, request: ExtendRequest) -> None:
        """Calls made together arrive together, so that they are decoded in one batch from their first token on."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append({"call": call, "request": request_to_json(request)})

    def _flush(self) -> None:
        if self._unsent and self._writer is not None:
            message = {"op": "extend", "calls": self._unsent}
            self._writer.write(json.dumps(message).encode() + b"\n")
        self._unsent = []

    def _ask(self, op: str, **values: Any) -> dict[str, Any]:
        """The answer, after the current decode step. ConnectionError if the process is gone, or hangs and is killed."""
        self._hello()
        self._control.sendall(json.dumps({"op": op, **values}).encode() + b"\n")
        limit_s = self.config.watchdog.rollout_timeout_s
        if not select.select([self._control], [], [], limit_s or None)[0]:
            self.say(f"watchdog: the engine process has not answered for {limit_s:.3g} s: it is killed")
            self._process.kill()
            raise ConnectionError("the engine process did not answer")
        line = self._answers.readline()
        if not line:
            raise ConnectionError("the engine process is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the engine process failed in {op}: {answer['error']}")
        return answer

    def _ask_or_last(self, op: str, **values: Any) -> dict[str, Any]:
        """The answer; while the process is being started again, what it said last."""
        if self._reader is not None:
            with contextlib.suppress(ConnectionError, EngineDied):
                self._last[op] = self._ask(op, **values)
        return self._last.get(op, {})

    # The contract

    @property
    def max_tokens(self) -> int:
        return self._hello()["max_tokens"]

    @property
    def kv_bytes_per_token(self) -> int:
        return self._hello()["kv_bytes_per_token"]

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        """See Engine."""
        await self._connect()
        call, self._next_call = self._next_call, self._next_call + 1
        future: asyncio.Future[list[Segment]] = asyncio.get_running_loop().create_future()
        self._calls[call] = (request, future)
        self._send_extend(call, request)
        try:
            return await future
        except asyncio.CancelledError:
            self._calls.pop(call, None)
            self._send({"op": "cancel", "call": call})
            raise

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        self._send({"op": "interrupt", "ids": None if rollout_ids is None else list(rollout_ids)})

    def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        found = self._ask_or_last("progress", ids=list(rollout_ids))
        return {i: [segment_from_json(s) for s in segments] for i, segments in found.items()}

    def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        return set(self._ask_or_last("queued", ids=list(rollout_ids)).get("ids", ()))

    def release(self, rollout_ids: Iterable[str]) -> None:
        self._send({"op": "release", "ids": list(rollout_ids)})

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightLoad:
        """See Engine. What runs goes on under the new weights after its current decode step."""
        started = time.perf_counter()
        names, num_bytes = [], 0
        for name, tensor in tensors:
            names.append(name)
            num_bytes += self._write(name, tensor)
        self.policy_version = version
        with contextlib.suppress(ConnectionError):  # it is being started again, and gets these weights then
            self._load(version, names)
        return WeightLoad(num_bytes, time.perf_counter() - started)

    def _write(self, name: str, tensor: torch.Tensor) -> int:
        import torch

        flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if name not in self._table:
            self._table[name] = (dtype, shape, self._num_bytes)
            self._num_bytes += -(-len(flat) // _ALIGNMENT) * _ALIGNMENT
            os.ftruncate(self._weights.fileno(), self._num_bytes)
        assert self._table[name][:2] == (dtype, shape), f"{name} has changed its shape or dtype"
        view, offset = flat.data, self._table[name][2]
        while view:
            written = os.pwrite(self._weights.fileno(), view, offset)
            view, offset = view[written:], offset + written
        return len(flat)

    def _load(self, version: int, names: list[str]) -> None:
        table = [[name, *self._table[name]] for name in names]
        self._ask("load", version=version, tensors=table)

    def use_threads(self, num: int) -> None:
        """Decode with so many CPU threads from now on."""
        self.threads = num
        with contextlib.suppress(ConnectionError):
            self._ask("threads", num=num)

    def stats(self) -> dict[str, float]:
        """Counters as of the last extend that returned, over all processes; engine/restarts: how often one died."""
        if not self._stats:
            self._stats = self._ask_or_last("stats")
        return self._counters() | {"engine/restarts": float(self.num_restarts)}

    def _counters(self) -> dict[str, float]:
        gauge = "kv/bytes"
        return {key: value + (0 if key == gauge else self._before.get(key, 0.0)) for key, value in self._stats.items()}

    async def close(self) -> None:
        """End the process."""
        self._closing = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.to_thread(self._process.wait)
        if self._reader is not None:
            self._reader.cancel()
        self._drop_process()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._weights.close()
