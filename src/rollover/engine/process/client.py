"""The parent's end of one engine process (child.py), from its start to its end. Never starts a second process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Sequence
from typing import Any

from rollover.config import Config
from rollover.engine.process.messages import requests_to_json
from rollover.engine.protocol import EngineDied, ExtendRequest
from rollover.processes import brief_waiting, child_environment
from rollover.workers.framing import BadMessage
from rollover.workers.worker import Reply, Worker, WorkerDied


class EngineClient:
    """Client of one engine process, which starts at once and loads the model in the background; `hello` waits for it.

    `threads`: CPU threads at its start. `files`: descriptors that it inherits.
    """

    def __init__(self, config: Config, threads: int, files: Sequence[int]) -> None:
        self.worker = Worker(
            "the engine process",
            "rollover.engine.process.child",
            environment=child_environment(**brief_waiting(config.run)),
            files=files,
        )
        self.start_s = 0.0
        """Seconds between its start and its hello."""
        self.serves = False
        """Whether it takes requests."""
        self.stats: dict[str, float] = {}
        """The engine's counters, as of its last reply."""
        self._hello: dict[str, Any] | None = None
        self._hello_lock = threading.Lock()
        self._said: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._unsent: dict[int, tuple[ExtendRequest, asyncio.Future[dict[str, Any]]]] = {}
        self._num_extends = 0
        started = self.worker.last_reply

        def on_hello(reply: Reply) -> bool:
            self.start_s = self.worker.last_reply - started
            self._said.put(reply)
            return True

        self.worker.submit({"op": "start", "config": config.model_dump(mode="json"), "threads": threads}, on_hello)

    def hello(self, limit_s: float | None = None) -> dict[str, Any]:
        """Wait until the process has loaded the model, and return what it says of itself. For any thread.

        EngineDied if it ends first, or takes longer than `limit_s` since this call.
        """
        with self._hello_lock:
            if self._hello is None:
                try:
                    said = self._said.get(timeout=limit_s)
                except queue.Empty:
                    self.kill()
                    raise EngineDied(f"the engine process did not load the model within {limit_s:.3g} s") from None
                if isinstance(said, Exception):
                    self.worker.wait()
                    raise EngineDied(
                        f"the engine process ended while it was loading the model (exit code {self.worker.exit_code})"
                    )
                self._hello, self.stats = said, said["stats"]
            return self._hello

    def begin(self) -> None:
        """It has the last weights: it takes requests until it ends."""
        self.serves = self.worker.alive

    async def ended(self) -> None:
        """Wait until the process has ended, and all its replies were received."""
        await self.worker.ended()
        self.serves = False

    async def extend(self, request: ExtendRequest) -> dict[str, Any]:
        """Return the reply; {} if the process ends before. It must serve.

        The requests of one turn of the event loop arrive together, so that they are decoded in one batch from their
        first token on.
        """
        loop = asyncio.get_running_loop()
        if not self._unsent:
            loop.call_soon(self._flush)
        self._num_extends = number = self._num_extends + 1
        reply: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._unsent[number] = request, reply
        try:
            return await reply
        except asyncio.CancelledError:
            if self._unsent.pop(number, None) is None:
                self.tell("cancel", number)
            raise

    def _flush(self) -> None:
        """Send the requests of this turn in one call, which has a reply for each of them."""
        unsent, self._unsent = self._unsent, {}
        if not unsent:
            return
        loop, left = asyncio.get_running_loop(), dict(unsent)

        def resolve(number: int, reply: dict[str, Any]) -> None:
            self.stats = reply.get("stats", self.stats)
            if not unsent[number][1].done():
                unsent[number][1].set_result(reply)

        def on_reply(reply: Reply) -> bool:
            numbers = list(left) if isinstance(reply, Exception) else [reply["extend"]]
            for number in numbers:
                del left[number]
                with contextlib.suppress(RuntimeError):  # the event loop is closed
                    loop.call_soon_threadsafe(resolve, number, {} if isinstance(reply, Exception) else reply)
            return not left

        requests = {number: request for number, (request, _) in unsent.items()}
        self.worker.submit({"op": "extend", "value": requests_to_json(requests)}, on_reply)

    async def ask(self, op: str, value: object, limit_s: float | None) -> Any:
        """Return the value of the reply, which comes after the current decode step; None if the process ends before.

        TimeoutError if there is none within `limit_s`. RuntimeError if it failed.
        """
        self._flush()
        try:
            reply = await self.worker.request({"op": op, "value": value}, limit_s=limit_s)
        except (WorkerDied, BadMessage):
            return None
        self.stats = reply["stats"]
        if "error" in reply:
            raise RuntimeError(f"the engine process failed in {op}: {reply['error']}")
        return reply["value"]

    def tell(self, op: str, value: object) -> None:
        """Send a request that has no reply, after all that came before it. Nothing happens if the process serves no
        longer, or not yet."""
        if self.serves:
            self._flush()
            self.worker.notify({"op": op, "value": value})

    def kill(self) -> bool:
        """End it at once. Whether it had not ended before."""
        lived = self.worker.alive
        self.worker.kill()
        return lived
