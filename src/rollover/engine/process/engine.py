"""An embedded engine in a child process, beside the trainer.

    extend ──▶ EngineClient of the current process ──reply──▶ segments
                 └── it died: interrupted calls return an empty answer, the others are sent to the next process

A process that dies is restarted with the last weights, and its calls are repeated: a rollout loses only the tokens of
its current `extend`. A process that does not answer within watchdog.rollout_timeout_s is killed and restarted. While
none serves, `progress` and `queued` are empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from rollover.config import Config
from rollover.engine.protocol import EngineDied, ExtendRequest, WeightLoad
from rollover.processes import brief_waiting, child_environment
from rollover.types import Prompt, Segment
from rollover.weights.shared_file import SharedFile
from rollover.workers.framing import BadMessage
from rollover.workers.worker import Reply, Worker, WorkerDied

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

_MAX_RESTARTS = 3  # without a finished extend in between
_SLOWER_START = 10  # a start that takes so many times the first one's time hangs
_GAUGES = ("kv/bytes", "engine/kernels")  # of the current process; the other counters are summed over all


@dataclass(eq=False)
class _Call:
    """An `extend`. `interrupted`: without a process it returns an empty answer."""

    rollout_id: str
    interrupted: bool = False


class ProcessEngine:
    """Engine in a child process that is restarted when it dies. `threads`: CPU threads of the process at its start."""

    def __init__(self, config: Config, threads: int) -> None:
        self.config, self.threads = config, threads
        self.oldest_version = 0
        self.num_restarts = 0
        self._failures = 0  # deaths of the process since the last answer
        self._calls: set[_Call] = set()
        self._counts: dict[str, float] = {}  # of processes that have ended
        self._weights = SharedFile()
        self._loading = asyncio.Lock()  # weights are being sent, or received by a process
        self._client = EngineClient(config, threads, self._weights.files)
        self._first_hello: dict[str, Any] | None = None
        self._start_limit_s: float | None = None
        self._serving: asyncio.Task[None] | None = None
        self._error: Exception | None = None  # set when the engine has ended for good
        self._changed = asyncio.Event()  # wakes the calls that wait for a process
        self._closing = False

    @property
    def pid(self) -> int:
        """Return the id of the current process."""
        return self._client.worker.pid

    # The process

    def _hello(self) -> dict[str, Any]:
        """Wait for the first process to load the model, reserve room for its weights, and return its hello."""
        if self._first_hello is None:
            hello = self._client.hello()
            self._weights.reserve(hello["weight_bytes"])
            self._first_hello = hello
        return self._first_hello

    async def _serve(self) -> None:
        """Serve calls until this engine is closed, or its process cannot be restarted."""
        try:
            while True:
                await self._serve_by_one_process()
                if self._closing:
                    return
                self._replace_process(self._client.worker.exit_code)
        except Exception as error:
            self._error = error
            self._wake_calls()

    async def _serve_by_one_process(self) -> None:
        """Serve calls by the current process until it ends."""
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
        async with self._loading:  # it gets the last weights before its first call
            if (update := self._weights.full_update()) is not None:
                await self._request("load_weights", update.message)
            client.begin()
        self.use_threads(self.threads)
        self._wake_calls()
        await client.ended()

    def _replace_process(self, code: int) -> None:
        """Start the next process after the current one died with this exit code."""
        self._failures += 1
        self.num_restarts += 1
        self._counts = self._total_counts()
        if self._failures > _MAX_RESTARTS:
            raise EngineDied(f"the engine process died {self._failures} times in a row (exit code {code})")
        logger.warning(
            f"the engine process died (exit code {code}): it is restarted, and"
            f" {sum(not call.interrupted for call in self._calls)} rollouts continue from their last segment"
        )
        self._client = EngineClient(self.config, self.threads, self._weights.files)

    def _wake_calls(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _request(self, op: str, value: object) -> Any:
        """Return the reply of the current process; None if it died, or hung and was killed."""
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
        """See Engine. Raises EngineDied if the process dies too often in a row."""
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
        self._wake_calls()

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        found = await self._query("progress", rollout_ids)
        return {rollout_id: segments_from_json(segments) for rollout_id, segments in found.items()}

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        return set(await self._query("queued", rollout_ids))

    async def _query(self, op: str, rollout_ids: Iterable[str]) -> dict[str, Any]:
        """Return the process's answers, by rollout id, about the calls in flight both before and after the query."""
        client, wanted = self._client, set(rollout_ids)
        calls = {call.rollout_id: call for call in self._calls if call.rollout_id in wanted}
        found = await self._request(op, list(calls)) if client.serves and calls else None
        return {i: value for i, value in (found or {}).items() if client.serves and calls[i] in self._calls}

    def release(self, rollout_ids: Iterable[str]) -> None:
        self._client.notify("release", list(rollout_ids))

    async def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightLoad:
        """See Engine. Running rollouts continue under the new weights after their current decode step."""
        started = time.perf_counter()
        async with self._loading:
            update = await asyncio.to_thread(self._weights.write, version, tensors)
            if self._client.serves:
                await self._request("load_weights", update.message)
            self.oldest_version = version
        return WeightLoad(update.num_bytes, time.perf_counter() - started)

    def use_threads(self, num: int) -> None:
        """Decode with this number of CPU threads from the next step on."""
        self.threads = num
        self._client.notify("use_threads", num)

    def stats(self) -> dict[str, float]:
        """Return counters as of the last reply, summed over all processes; engine/restarts: deaths of a process."""
        self._hello()
        return self._total_counts() | {"engine/restarts": float(self.num_restarts)}

    def _total_counts(self) -> dict[str, float]:
        before = {key: value for key, value in self._counts.items() if key not in _GAUGES}
        now = self._client.stats
        return {key: now.get(key, 0.0) + before.get(key, 0.0) for key in self._counts | now}

    async def close(self) -> None:
        """Interrupt running rollouts, and end the process."""
        self._closing = True
        self.interrupt()
        self._client.kill()
        await self._client.ended()
        if self._serving is not None:
            await asyncio.wait([self._serving])
        self._weights.close()


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
        self._hellos: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._unsent: dict[int, tuple[ExtendRequest, asyncio.Future[dict[str, Any]]]] = {}
        self._num_extends = 0
        started = self.worker.last_reply

        def on_hello(reply: Reply) -> bool:
            self.start_s = self.worker.last_reply - started
            self._hellos.put(reply)
            return True

        self.worker.submit({"op": "start", "config": config.model_dump(mode="json"), "threads": threads}, on_hello)

    def hello(self, limit_s: float | None = None) -> dict[str, Any]:
        """Wait until the process has loaded the model, and return its first reply. For any thread.

        Raises EngineDied if it ends first, or takes longer than `limit_s` from now.
        """
        with self._hello_lock:
            if self._hello is None:
                try:
                    reply = self._hellos.get(timeout=limit_s)
                except queue.Empty:
                    self.kill()
                    raise EngineDied(f"the engine process did not load the model within {limit_s:.3g} s") from None
                if isinstance(reply, Exception):
                    self.worker.wait()
                    raise EngineDied(
                        f"the engine process ended while it was loading the model (exit code {self.worker.exit_code})"
                    )
                self._hello, self.stats = reply, reply["stats"]
            return self._hello

    def begin(self) -> None:
        """Take requests from now on: the process has the last weights."""
        self.serves = self.worker.alive

    async def ended(self) -> None:
        """Wait until the process has ended, and all its replies were received."""
        await self.worker.ended()
        self.serves = False

    async def extend(self, request: ExtendRequest) -> dict[str, Any]:
        """Return the reply; {} if the process ends first. It must serve.

        Requests of one turn of the event loop are sent together, so that they are decoded in one batch from the first
        token on.
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
        """Return the value of the reply, sent after the current decode step; None if the process ends first.

        Raises TimeoutError after `limit_s`, RuntimeError if the request failed.
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
        """Send a request without a reply, after all earlier ones. No effect if the process does not serve."""
        if self.serves:
            self._flush()
            self.worker.notify({"op": op, "value": value})

    def kill(self) -> bool:
        """Kill the process. Returns whether it was alive."""
        alive = self.worker.alive
        self.worker.kill()
        return alive


# Messages. A float32 survives as the shortest decimal of the same double: the receiver gets the bits that were sent.


@dataclass(frozen=True)
class _Calls:
    """Requests with deduplicated prompts. `calls`: number, index of the prompt in `prompts`, request without prompt."""

    prompts: list[Prompt]
    calls: list[tuple[int, int, ExtendRequest]]


_CALLS = TypeAdapter(_Calls)


def requests_to_json(requests: Mapping[int, ExtendRequest]) -> dict[str, Any]:
    """Return requests by call number, each distinct prompt once."""
    prompts: dict[Prompt, int] = {}
    calls = [
        (number, prompts.setdefault(request.prompt, len(prompts)), replace(request, prompt=Prompt()))
        for number, request in requests.items()
    ]
    return _CALLS.dump_python(_Calls(list(prompts), calls), mode="json", exclude_defaults=True)


def requests_from_json(data: Mapping[str, Any]) -> dict[int, ExtendRequest]:
    received = _CALLS.validate_python(data)
    return {number: replace(request, prompt=received.prompts[index]) for number, index, request in received.calls}


def segments_to_json(segments: Iterable[Segment]) -> list[dict[str, Any]]:
    return [s.to_json() | {"token_ids": s.token_ids.tolist(), "logprobs": s.logprobs.tolist()} for s in segments]


def segments_from_json(data: Iterable[Mapping[str, Any]]) -> list[Segment]:
    return [
        Segment.from_json(s, np.array(s["token_ids"], dtype=np.int32), np.array(s["logprobs"], dtype=np.float32))
        for s in data
    ]
