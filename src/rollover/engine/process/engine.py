"""An embedded engine in a process of its own, beside the trainer (client.py: our end of one such process).

    extend ──▶ the present process ──reply──▶ its segments
                 └── it died: what was interrupted returns as it is, the rest is asked again of the next one

Owns which process is the present one. A process that dies is started again with the last weights, and what it was asked
is asked again: a rollout loses the tokens of its current `extend`, nothing else. One that hangs, so that it does not
answer within watchdog.rollout_timeout_s, is killed first. While there is none, nothing is known of what it does:
`progress` and `queued` are empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollover.config import Config
from rollover.engine.process.messages import requests_to_json, segments_from_json
from rollover.engine.protocol import EngineDied, ExtendRequest, WeightLoad
from rollover.processes import brief_waiting, child_environment
from rollover.types import Segment
from rollover.weights.shared_file import SharedFile
from rollover.workers.framing import BadMessage
from rollover.workers.worker import Reply, Worker, WorkerDied

if TYPE_CHECKING:
    import torch


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
                self.notify("cancel", number)
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

    async def request(self, op: str, value: object, limit_s: float | None) -> Any:
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

    def notify(self, op: str, value: object) -> None:
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


logger = logging.getLogger(__name__)

_MAX_RESTARTS = 3  # without a finished extend in between
_SLOWER_START = 10  # a start that takes so many times the first one's time hangs
_GAUGES = ("kv/bytes", "engine/kernels")  # of the present process alone; the other counters are summed over all


@dataclass(eq=False)
class _Call:
    """An `extend`. `interrupted`: without a process it returns with what it began with."""

    rollout_id: str
    interrupted: bool = False


class ProcessEngine:
    """The Engine contract, and `kv_bytes_per_token` of the embedded engine.

    `threads`: CPU threads of the process at its start.
    """

    def __init__(self, config: Config, threads: int) -> None:
        self.config, self.threads = config, threads
        self.oldest_version = 0
        self.num_restarts = 0
        self._failures = 0  # processes that died since the last answer
        self._calls: set[_Call] = set()
        self._counts: dict[str, float] = {}  # of processes that have ended
        self._weights = SharedFile()
        self._loading = asyncio.Lock()  # weights are being sent, or received by a process
        self._client = EngineClient(config, threads, self._weights.files)
        self._said: dict[str, Any] | None = None  # the first process's hello
        self._start_limit_s: float | None = None
        self._serving: asyncio.Task[None] | None = None
        self._error: Exception | None = None  # it has ended for good
        self._changed = asyncio.Event()  # set when calls without a process have to look again
        self._closing = False

    @property
    def pid(self) -> int:
        """The present process's id."""
        return self._client.worker.pid

    # The process

    def _hello(self) -> dict[str, Any]:
        """What the first process said when it had loaded the model. Room for its weights is taken then."""
        if self._said is None:
            said = self._client.hello()
            self._weights.reserve(said["weight_bytes"])
            self._said = said
        return self._said

    async def _serve(self) -> None:
        """Serve calls until this engine is closed, or its process cannot be started any more."""
        try:
            while True:
                await self._serve_by_one_process()
                if self._closing:
                    return
                self._replace_process(self._client.worker.exit_code)
        except Exception as error:
            self._error = error
            self._look_again()

    async def _serve_by_one_process(self) -> None:
        """Serve calls by the present process until it ends."""
        client = self._client
        try:
            await asyncio.to_thread(client.hello, self._start_limit_s)
        except EngineDied:
            if self.num_restarts == 0:
                raise  # the model cannot be loaded at all
            return await client.ended()
        if self._start_limit_s is None and self.config.watchdog.rollout_timeout_s:
            self._start_limit_s = max(self.config.watchdog.rollout_timeout_s, _SLOWER_START * client.start_s)
        self._hello()
        async with self._loading:  # it has the last weights when its first call begins
            if (update := self._weights.full_update()) is not None:
                await self._ask("load_weights", update.message)
            client.begin()
        self.use_threads(self.threads)
        self._look_again()
        await client.ended()

    def _replace_process(self, code: int) -> None:
        """The process died with this exit code: start the next one."""
        self._failures += 1
        self.num_restarts += 1
        self._counts = self._total_counts()
        if self._failures > _MAX_RESTARTS:
            raise EngineDied(f"the engine process died {self._failures} times in a row (exit code {code})")
        logger.warning(
            f"the engine process died (exit code {code}): it is started again, and"
            f" {sum(not call.interrupted for call in self._calls)} rollouts go on from their last segment"
        )
        self._client = EngineClient(self.config, self.threads, self._weights.files)

    def _look_again(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _ask(self, op: str, value: object) -> Any:
        """The answer; None if the process is gone, or hangs and is killed: the next one is told at its start."""
        client, limit_s = self._client, self.config.watchdog.rollout_timeout_s or None
        try:
            return await client.request(op, value, limit_s)
        except TimeoutError:
            if client.kill():
                logger.warning(f"watchdog: the engine process has not answered for {limit_s:.3g} s: it is killed")
        return None

    # The contract

    @property
    def max_tokens(self) -> int:
        return self._hello()["max_tokens"]

    @property
    def kv_bytes_per_token(self) -> int:
        return self._hello()["kv_bytes_per_token"]

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        """See Engine. EngineDied if the process ends again and again."""
        if self._error is not None:
            raise self._error
        if self._serving is None:
            self._serving = asyncio.ensure_future(self._serve())
        call = _Call(request.rollout_id)
        self._calls.add(call)
        try:
            reply = {}
            while not reply:
                if call.interrupted:
                    return request.nothing()
                if self._client.serves:
                    reply = await self._client.extend(request)
                else:
                    await self._changed.wait()
                if self._error is not None:
                    raise self._error
        finally:
            self._calls.remove(call)
        self._failures = 0
        if "error" in reply:
            raise (ValueError if reply["user"] else RuntimeError)(reply["error"])
        return segments_from_json(reply["value"])

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        wanted = None if rollout_ids is None else list(rollout_ids)
        for call in self._calls:
            call.interrupted = call.interrupted or wanted is None or call.rollout_id in wanted
        self._client.notify("interrupt", wanted)
        self._look_again()

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        found = await self._ask_of_calls("progress", rollout_ids)
        return {rollout_id: segments_from_json(segments) for rollout_id, segments in found.items()}

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        return set(await self._ask_of_calls("queued", rollout_ids))

    async def _ask_of_calls(self, op: str, rollout_ids: Iterable[str]) -> dict[str, Any]:
        """Its answers, by rollout id, about those calls that were under way before it was asked and still are."""
        client, wanted = self._client, set(rollout_ids)
        asked = {call.rollout_id: call for call in self._calls if call.rollout_id in wanted}
        found = await self._ask(op, list(asked)) if client.serves and asked else None
        return {i: of for i, of in (found or {}).items() if client.serves and asked[i] in self._calls}

    def release(self, rollout_ids: Iterable[str]) -> None:
        self._client.notify("release", list(rollout_ids))

    async def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightLoad:
        """See Engine. What runs goes on under the new weights after its current decode step."""
        started = time.perf_counter()
        async with self._loading:
            update = await asyncio.to_thread(self._weights.write, version, tensors)
            if self._client.serves:
                await self._ask("load_weights", update.message)
            self.oldest_version = version
        return WeightLoad(update.num_bytes, time.perf_counter() - started)

    def use_threads(self, num: int) -> None:
        """Decode with so many CPU threads from its next step on."""
        self.threads = num
        self._client.notify("use_threads", num)

    def stats(self) -> dict[str, float]:
        """Counters as of the last extend that returned, over all processes; engine/restarts: how often one died."""
        self._hello()
        return self._total_counts() | {"engine/restarts": float(self.num_restarts)}

    def _total_counts(self) -> dict[str, float]:
        before = {key: value for key, value in self._counts.items() if key not in _GAUGES}
        now = self._client.stats
        return {key: now.get(key, 0.0) + before.get(key, 0.0) for key in self._counts | now}

    async def close(self) -> None:
        """Interrupt what runs, and end the process."""
        self._closing = True
        self.interrupt()
        self._client.kill()
        await self._client.ended()
        if self._serving is not None:
            await asyncio.wait([self._serving])
        self._weights.close()
