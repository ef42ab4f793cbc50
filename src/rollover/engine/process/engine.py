"""An embedded engine in a process of its own, beside the trainer (client.py: its channels).

    extend ──▶ calls under way ──▶ the present process ──reply──▶ the call that it answers
                    └── it died: what was interrupted returns as it is, the rest is asked again of the next one

Owns the calls under way, the last weights, and which process is the present one. A process that dies is started again
with the last weights, and what it was asked is asked again: a rollout loses the tokens of its current `extend`, nothing
else. One that hangs, so that it does not answer on control within watchdog.rollout_timeout_s, is killed first. While
there is none, nothing is known of what it does: `progress` and `queued` are empty.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollover.config import Config
from rollover.engine.process.client import EngineClient, replies_of
from rollover.engine.process.wire import requests_to_json, segment_from_json
from rollover.engine.protocol import EngineDied, ExtendRequest, WeightLoad
from rollover.types import Segment
from rollover.weights.shared_file import SharedFile

if TYPE_CHECKING:
    import torch

_MAX_RESTARTS = 3  # without a finished extend in between
_EXIT_S = 1.0  # between the end of its replies and its exit code
_GAUGES = ("kv/bytes", "engine/kernels")  # of the present process alone
_SLOWER_START = 10  # a start that takes so many times the first one's time hangs


@dataclass(eq=False)
class _Call:
    """An `extend` under way. `interrupted`: should its process die, it returns with what it began with."""

    request: ExtendRequest
    future: asyncio.Future[list[Segment]]
    interrupted: bool = False


class ProcessEngine:
    """The Engine contract, and `kv_bytes_per_token` of the embedded engine.

    `threads`: of the process at its start. `say` prints a line when the process had to be started again.
    """

    def __init__(self, config: Config, threads: int, say: Callable[[str], None] | None = None) -> None:
        self.config, self.threads = config, threads
        self.say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self.oldest_version = 0
        self.num_restarts = 0
        self._failures = 0
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0
        self._unsent: list[int] = []
        self._weights = SharedFile(self.say)
        self._loading = asyncio.Lock()  # the file is written, or read by a process
        self._version = 0  # of what is in the file
        self._stats: dict[str, float] = {}
        self._before: dict[str, float] = {}  # counters of the processes that died
        self._child = EngineClient(config, threads)
        self._said: dict[str, Any] | None = None
        self._up = False  # the present process has the last weights and gets the calls
        self._start_limit_s: float | None = None
        self._serving: asyncio.Task[None] | None = None
        self._error: Exception | None = None  # it has ended for good
        self._closing = False

    @property
    def pid(self) -> int:
        """Of the present process."""
        return self._child.pid

    # The process

    def _hello(self) -> dict[str, Any]:
        """What the first process says, once its model is loaded; there is room for its weights then."""
        if self._said is None:
            said = self._child.hello()
            self._weights.reserve(said["weight_bytes"])
            self._said = said
        return self._said

    def _serve(self) -> None:
        """Begin to serve calls, with the first of them. Raises what ended it."""
        if self._error is not None:
            raise self._error
        if self._serving is None:
            self._serving = asyncio.ensure_future(self._serve_to_the_end())

    async def _serve_to_the_end(self) -> None:
        try:
            while True:
                await self._serve_by_one_process()
                code = await self._child.end(grace_s=_EXIT_S)
                if self._closing:
                    return
                self._replace_process(code)
        except Exception as error:
            self._error = error
            calls, self._calls = self._calls, {}
            for call in calls.values():
                if not call.future.done():
                    call.future.set_exception(error)

    async def _serve_by_one_process(self) -> None:
        """Returns when it has ended."""
        try:
            await asyncio.to_thread(self._child.hello, self._start_limit_s)
        except EngineDied:
            if self.num_restarts == 0:
                raise  # it cannot be loaded at all
            return
        if self._start_limit_s is None and self.config.watchdog.rollout_timeout_s:
            self._start_limit_s = max(self.config.watchdog.rollout_timeout_s, _SLOWER_START * self._child.start_s)
        replies = await self._child.open()
        self._hello()
        async with self._loading:  # it has the last weights when its first call begins
            if self._weights.table():
                await self._load(None)
            self._up = True
        self.use_threads(self.threads)
        self._send_extends(list(self._calls))
        async for reply in replies_of(replies):
            self._settle(reply)
        self._up = False

    def _settle(self, reply: dict[str, Any]) -> None:
        self._stats = reply["stats"]
        self._failures = 0
        call = self._calls.pop(reply["call"], None)
        if call is None or call.future.done():
            return
        if "segments" in reply:
            call.future.set_result([segment_from_json(s) for s in reply["segments"]])
        else:
            call.future.set_exception((ValueError if reply["user"] else RuntimeError)(reply["error"]))

    def _replace_process(self, code: int) -> None:
        """It died with this exit code: start the next one."""
        self._failures += 1
        self.num_restarts += 1
        self._before, self._stats = self._counters(), {}
        if self._failures > _MAX_RESTARTS:
            raise EngineDied(f"the engine process died {self._failures} times in a row (exit code {code})")
        self._return([number for number, call in self._calls.items() if call.interrupted])
        self.say(
            f"the engine process died (exit code {code}): it is started again, and {len(self._calls)} rollouts"
            " go on from their last segment"
        )
        self._child = EngineClient(self.config, self.threads)

    def _return(self, numbers: Iterable[int]) -> None:
        """No process has these calls, and they were interrupted: they return with what they began with."""
        for number in numbers:
            call = self._calls.pop(number)
            if not call.future.done():
                call.future.set_result(call.request.nothing())

    def _send(self, message: dict[str, Any]) -> None:
        if self._up:
            self._flush()
            self._child.write(message)

    def _send_extends(self, numbers: Iterable[int]) -> None:
        """Calls made together arrive together, so that they are decoded in one batch from their first token on."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += numbers

    def _flush(self) -> None:
        numbers, self._unsent = self._unsent, []
        requests = {n: self._calls[n].request for n in numbers if n in self._calls}
        if requests and self._up:
            self._child.write({"op": "extend", **requests_to_json(requests)})

    async def _ask(self, op: str, **values: Any) -> dict[str, Any]:
        """The answer; {} if the process is gone, or hangs and is killed: the next one learns it at its start."""
        child, limit_s = self._child, self.config.watchdog.rollout_timeout_s or None
        try:
            return await child.ask(op, limit_s=limit_s, **values)
        except TimeoutError:
            self.say(f"watchdog: the engine process has not answered for {limit_s:.3g} s: it is killed")
            child.kill()
        except ConnectionError:
            child.kill()
        return {}

    async def _load(self, names: list[str] | None) -> None:
        table, file = self._weights.table(names), self._weights.fileno()
        await self._ask("load", version=self._version, tensors=table, file=file)

    # The contract

    @property
    def max_tokens(self) -> int:
        return self._hello()["max_tokens"]

    @property
    def kv_bytes_per_token(self) -> int:
        return self._hello()["kv_bytes_per_token"]

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        """See Engine. EngineDied if the process ends again and again."""
        self._serve()
        number, self._num_calls = self._num_calls, self._num_calls + 1
        future: asyncio.Future[list[Segment]] = asyncio.get_running_loop().create_future()
        self._calls[number] = _Call(request, future)
        if self._up:
            self._send_extends([number])
        try:
            return await future
        except asyncio.CancelledError:
            self._calls.pop(number, None)
            self._send({"op": "cancel", "call": number})
            raise

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        wanted = None if rollout_ids is None else set(rollout_ids)
        numbers = [n for n, c in self._calls.items() if wanted is None or c.request.rollout_id in wanted]
        if not self._up:
            self._return(numbers)
            return
        for number in numbers:
            self._calls[number].interrupted = True
        self._send({"op": "interrupt", "ids": None if wanted is None else sorted(wanted)})

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        found = await self._ask_of_calls("progress", set(rollout_ids))
        return {rollout_id: [segment_from_json(s) for s in segments] for rollout_id, segments in found.items()}

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        return set(await self._ask_of_calls("queued", set(rollout_ids)))

    async def _ask_of_calls(self, op: str, rollout_ids: Container[str]) -> dict[str, list[Any]]:
        """Its answers, by rollout id, about these rollouts' calls under way: before it was asked, and still."""
        child, calls = self._child, {n: c for n, c in self._calls.items() if c.request.rollout_id in rollout_ids}
        found = (await self._ask(op, calls=list(calls))).get("calls", []) if self._up and calls else []
        if child is not self._child or not self._up:
            return {}
        return {calls[n].request.rollout_id: answer for n, answer in found if not calls[n].future.done()}

    def release(self, rollout_ids: Iterable[str]) -> None:
        self._send({"op": "release", "ids": list(rollout_ids)})

    async def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightLoad:
        """See Engine. What runs goes on under the new weights after its current decode step."""
        started = time.perf_counter()
        async with self._loading:
            sizes = await asyncio.to_thread(lambda: {name: self._weights.write(name, t) for name, t in tensors})
            self._version = version
            if self._up:
                await self._load(list(sizes))
            self.oldest_version = version
        return WeightLoad(sum(sizes.values()), time.perf_counter() - started)

    def use_threads(self, num: int) -> None:
        """Decode with so many CPU threads from its next step on."""
        self.threads = num
        self._send({"op": "threads", "num": num})

    def stats(self) -> dict[str, float]:
        """Counters as of the last extend that returned, over all processes; engine/restarts: how often one died."""
        if not self._stats and not self._before:
            self._stats = self._hello()["stats"]
        return self._counters() | {"engine/restarts": float(self.num_restarts)}

    def _counters(self) -> dict[str, float]:
        before = {key: value for key, value in self._before.items() if key not in _GAUGES}
        return {key: self._stats.get(key, 0.0) + before.get(key, 0.0) for key in self._before | self._stats}

    async def close(self) -> None:
        """End the process."""
        self._closing = True
        await self._child.end()
        if self._serving is not None:
            await asyncio.wait([self._serving])
        for call in self._calls.values():
            call.future.cancel()
        self._weights.close()
