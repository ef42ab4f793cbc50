"""Our end of one engine process, from its start to its end: whoever asks it asks this process and no other.

    requests   pipe, JSON lines    extend, cancel, interrupt, release, threads    written and read without blocking
    replies    pipe, JSON lines    what an extend returned, and counters
    control    socket, JSON lines  load, progress, queued: each is answered under its id, and waited for in a thread

Owns the process and its channels. Does not remember what it was asked, and never starts a second process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rollover.config import Config
from rollover.engine.process.wire import Channel, requests_to_json
from rollover.engine.protocol import EngineDied, ExtendRequest
from rollover.processes import brief_waiting, child_command, child_environment

_MAX_LINE_BYTES = 2**30


class EngineClient:
    """It starts at once, and loads the model while its parent does other things; `hello` waits for it."""

    def __init__(self, config: Config, threads: int) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            child_command("rollover.engine.process.child", theirs.fileno()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env=child_environment(**brief_waiting(config.run)),
            start_new_session=True,  # Ctrl-C is for the loop
        )
        theirs.close()
        self._started = time.monotonic()
        self.start_s = 0.0
        """Seconds between its start and the moment that its hello was received."""
        self.serves = False
        """Whether it takes requests: set by whoever has given it the last weights."""
        self._control = Channel(ours)
        self._hello: dict[str, Any] | None = None
        self._hello_lock = threading.Lock()
        self._num_asked = 0
        self._gone = False
        self._asking = asyncio.Lock()  # one question at a time
        self._writer: asyncio.WriteTransport | None = None
        self._replies: asyncio.StreamReader | None = None
        self._unsent: dict[int, ExtendRequest] = {}
        with contextlib.suppress(ConnectionError):  # `hello` says how it ended
            self._control.send({"config": config.model_dump(mode="json"), "threads": threads})

    @property
    def pid(self) -> int:
        return self._process.pid

    def hello(self, limit_s: float | None = None) -> dict[str, Any]:
        """Wait until the process has loaded the model, and return what it says of itself. For any thread.

        EngineDied if it ends first, or takes longer than `limit_s` since this call.
        """
        with self._hello_lock:
            if self._hello is None:
                try:
                    self._hello = self._control.receive(limit_s)
                    self.start_s = time.monotonic() - self._started
                except TimeoutError:
                    self.kill()
                    raise EngineDied(f"the engine process did not load the model within {limit_s:.3g} s") from None
                except ConnectionError:
                    code = self._process.wait()
                    raise EngineDied(
                        f"the engine process ended while it was loading the model (exit code {code})"
                    ) from None
            return self._hello

    async def ask(self, op: str, *, limit_s: float | None, file: int | None = None, **values: Any) -> dict[str, Any]:
        """Ask the process and return its answer, which comes after its current decode step. It must have said hello.

        TimeoutError if it does not answer within `limit_s`, ConnectionError if it has ended; from then on nothing more
        is asked of it. RuntimeError if it failed. Whoever asks may be cancelled: the answer is received all the same.
        """

        async def in_turn() -> dict[str, Any]:
            async with self._asking:
                return await asyncio.to_thread(self._ask, op, limit_s, file, values)

        asking = asyncio.ensure_future(in_turn())
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, should nobody wait for it
        return await asyncio.shield(asking)

    def _ask(self, op: str, limit_s: float | None, file: int | None, values: dict[str, Any]) -> dict[str, Any]:
        if self._gone:
            raise ConnectionError("the engine process is gone")
        self._num_asked += 1
        self._gone = True  # unless its answer comes
        self._control.send({"id": self._num_asked, "op": op, **values}, file=file, limit_s=limit_s)
        answer = self._control.receive(limit_s)
        if answer.pop("id") != self._num_asked:
            raise ConnectionError("the engine process answered another question")
        self._gone = False
        if "error" in answer:
            raise RuntimeError(f"the engine process failed in {op}: {answer['error']}")
        return answer

    async def open(self) -> None:
        """Open the pipes for requests and replies."""
        loop = asyncio.get_running_loop()
        replies = self._replies = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(replies), self._process.stdout)
        self._writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._process.stdin)

    async def replies(self) -> AsyncIterator[dict[str, Any]]:
        """Its replies until it ends, when it `serves` no longer; half a line at the end is no reply."""
        assert self._replies is not None, "the pipes are open"
        while (line := await self._replies.readline()).endswith(b"\n"):
            yield json.loads(line)
        self.serves = False

    def extend(self, requests: Mapping[int, ExtendRequest]) -> None:
        """Send these calls. Those of one turn of the event loop arrive together, so that they are decoded in one batch
        from their first token on."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent |= requests

    def cancel(self, call: int) -> None:
        if self._unsent.pop(call, None) is None:
            self.tell({"op": "cancel", "call": call})

    def tell(self, message: dict[str, Any]) -> None:
        """Send a request that has no answer, after all that came before it. Nothing happens if the process serves no
        longer, or not yet."""
        if self.serves:
            self._flush()
            self._write(message)

    def _flush(self) -> None:
        requests, self._unsent = self._unsent, {}
        if requests and self.serves:
            self._write({"op": "extend", **requests_to_json(requests)})

    def _write(self, message: dict[str, Any]) -> None:
        assert self._writer is not None, "the pipes are open"
        self._writer.write(json.dumps(message).encode() + b"\n")

    def kill(self) -> None:
        """End it at once: nothing more is asked of it."""
        self._gone = True
        self._process.kill()

    async def end(self, grace_s: float = 0.0) -> int:
        """Kill it if it lives on for `grace_s`, and close its channels. Returns its exit code."""
        if grace_s and not self._gone:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, grace_s)
        self.kill()
        code = await asyncio.to_thread(self._process.wait)
        if self._writer is not None:
            self._writer.close()
        async with self._asking:  # who waits for an answer of a dead process learns it at once
            self._control.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return code
