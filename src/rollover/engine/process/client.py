"""The parent's end of one engine process, from its start to its end.

JSON lines over one socket, in order: extend, load_weights, progress and queued have a number, which is that of the
reply; what needs no reply has none. Owns the process and the socket. Never starts a second process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from rollover.config import Config
from rollover.engine.process.messages import MAX_LINE_BYTES, line, requests_to_json
from rollover.engine.protocol import EngineDied, ExtendRequest
from rollover.processes import brief_waiting, child_command, child_environment

_GRACE_S = 0.05


class EngineClient:
    """It starts at once, and loads the model while its parent does other things; `hello` waits for it.

    `threads`: CPU threads at its start. `files`: descriptors that it inherits.
    """

    def __init__(self, config: Config, threads: int, files: Sequence[int]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                child_command("rollover.engine.process.child", theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the child prints to stderr
                pass_fds=[theirs.fileno(), *files],
                env=child_environment(**brief_waiting(config.run)),
                start_new_session=True,  # Ctrl-C is for the loop
            )
        self.pid = self._process.pid
        self._started = time.monotonic()
        self.start_s = 0.0
        """Seconds between its start and the moment that its hello was received."""
        self.serves = False
        """Whether it takes requests: set by whoever has given it the last weights."""
        self.stats: dict[str, float] = {}
        """The engine's counters, as of its last reply."""
        self._hello: dict[str, Any] | None = None
        self._hello_lock = threading.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}  # due
        self._num_calls = 0
        self._unsent: dict[int, ExtendRequest] = {}
        self._gone = False  # killed, or ended
        with contextlib.suppress(OSError):  # it has ended: `hello` says how
            self._socket.sendall(line({"config": config.model_dump(mode="json"), "threads": threads}))

    def hello(self, limit_s: float | None = None) -> dict[str, Any]:
        """Wait until the process has loaded the model, and return what it says of itself. For any thread.

        EngineDied if it ends first, or takes longer than `limit_s` since this call.
        """
        with self._hello_lock:
            if (said := self._hello) is None:
                self._socket.settimeout(limit_s)
                try:
                    said = json.loads(self._socket.makefile("rb").readline())  # it sends no more unasked
                except TimeoutError:
                    self.kill()
                    raise EngineDied(f"the engine process did not load the model within {limit_s:.3g} s") from None
                except (OSError, ValueError):
                    code = self._process.wait()
                    raise EngineDied(
                        f"the engine process ended while it was loading the model (exit code {code})"
                    ) from None
                self._hello, self.stats, self.start_s = said, said["stats"], time.monotonic() - self._started
            return said

    async def open(self) -> asyncio.Task[None]:
        """Read its replies from now on, in a task that ends when the process does. It must have said hello."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MAX_LINE_BYTES)
        return asyncio.ensure_future(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while (received := await reader.readline()).endswith(b"\n"):  # half a line at the end is no reply
                message = json.loads(received)
                self.stats = message["stats"]
                self._resolve(message["call"], message)
        self.serves, self._gone = False, True
        for number in list(self._replies):
            self._resolve(number, {})

    def _resolve(self, number: int, message: dict[str, Any]) -> None:
        reply = self._replies.pop(number, None)
        if reply is not None and not reply.done():
            reply.set_result(message)

    async def extend(self, request: ExtendRequest) -> dict[str, Any]:
        """Return the reply; {} if the process ends before. It must serve.

        The requests of one turn of the event loop arrive together, so that they are decoded in one batch from their
        first token on.
        """
        number, reply = self._begin()
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent[number] = request
        try:
            return await reply
        except asyncio.CancelledError:
            if self._unsent.pop(number, None) is None:
                self.tell("cancel", number)
            raise

    async def ask(self, op: str, value: object, limit_s: float | None) -> Any:
        """Return the value of the reply, which comes after the current decode step; None if the process ends before.

        TimeoutError if there is none within `limit_s`. RuntimeError if it failed.
        """
        if self._gone:
            return None
        number, reply = self._begin()
        self._flush()
        self._write(op, value, number)
        await asyncio.wait([reply], timeout=limit_s)
        if not reply.done():  # something may have held up this event loop: what came meanwhile counts
            await asyncio.sleep(_GRACE_S)
        if not reply.done():
            raise TimeoutError
        if "error" in reply.result():
            raise RuntimeError(f"the engine process failed in {op}: {reply.result()['error']}")
        return reply.result().get("value")

    def tell(self, op: str, value: object) -> None:
        """Send a request that has no reply, after all that came before it. Nothing happens if the process serves no
        longer, or not yet."""
        if self.serves:
            self._flush()
            self._write(op, value)

    def _begin(self) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        self._num_calls += 1
        reply = self._replies[self._num_calls] = asyncio.get_running_loop().create_future()
        return self._num_calls, reply

    def _flush(self) -> None:
        requests, self._unsent = self._unsent, {}
        if requests and self.serves:
            self._write("extend", requests_to_json(requests))

    def _write(self, op: str, value: object, number: int | None = None) -> None:
        assert self._writer is not None, "the socket is open"
        self._writer.write(line({"op": op, "value": value, "call": number}))

    def kill(self) -> bool:
        """End it at once: nothing more is asked of it. Whether it had not ended before."""
        lived, self._gone = not self._gone, True
        self._process.kill()
        return lived

    async def end(self, grace_s: float = 0.0) -> int:
        """Kill it if it lives on for `grace_s`, and close the socket. Returns its exit code."""
        if grace_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, grace_s)
        self.kill()
        code = await asyncio.to_thread(self._process.wait)
        if self._writer is not None:
            self._writer.close()
        self._socket.close()
        return code
