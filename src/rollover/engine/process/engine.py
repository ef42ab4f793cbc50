"""An embedded engine in a process of its own, beside the trainer (client.py: our end of one such process).

    extend ──▶ calls under way ──▶ the present process ──reply──▶ the call that it answers
                    └── it died: what was interrupted returns as it is, the rest is asked again of the next one

Owns which process is the present one. A process that dies is started again with the last weights, and what it was asked
is asked again: a rollout loses the tokens of its current `extend`, nothing else. One that hangs, so that it does not
answer on control within watchdog.rollout_timeout_s, is killed first. While there is none, nothing is known of what it
does: `progress` and `queued` are empty.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rollover.config import Config
from rollover.engine.process.calls import Calls
from rollover.engine.process.client import EngineClient
from rollover.engine.process.counters import Counters
from rollover.engine.process.wire import segment_from_json
from rollover.engine.protocol import EngineDied, ExtendRequest, WeightLoad
from rollover.types import Segment
from rollover.weights.build import build_transport
from rollover.weights.protocol import Parcel, TransportSetup

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_MAX_RESTARTS = 3  # without a finished extend in between
_EXIT_S = 1.0  # between the end of its replies and its exit code
_SLOWER_START = 10  # a start that takes so many times the first one's time hangs


class ProcessEngine:
    """The Engine contract, and `kv_bytes_per_token` of the embedded engine.

    `threads`: CPU threads of the process at its start.
    """

    def __init__(self, config: Config, threads: int) -> None:
        self.config, self.threads = config, threads
        self.oldest_version = 0
        self.num_restarts = 0
        self._failures = 0  # processes that died since the last answer
        self._calls = Calls()
        self._counters = Counters()
        self._weights = build_transport("shared_file", TransportSetup())
        self._loading = asyncio.Lock()  # weights are being sent, or received by a process
        self._client = EngineClient(config, threads)
        self._said: dict[str, Any] | None = None  # the first process's hello
        self._start_limit_s: float | None = None
        self._serving: asyncio.Task[None] | None = None
        self._error: Exception | None = None  # it has ended for good
        self._closing = False

    @property
    def pid(self) -> int:
        """The present process's id."""
        return self._client.pid

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
                code = await self._client.end(grace_s=_EXIT_S)
                if self._closing:
                    return
                self._replace_process(code)
        except Exception as error:
            self._error = error
            self._calls.fail(error)

    async def _serve_by_one_process(self) -> None:
        """Serve calls by the present process until it ends."""
        client = self._client
        try:
            await asyncio.to_thread(client.hello, self._start_limit_s)
        except EngineDied:
            if self.num_restarts == 0:
                raise  # the model cannot be loaded at all
            return
        if self._start_limit_s is None and self.config.watchdog.rollout_timeout_s:
            self._start_limit_s = max(self.config.watchdog.rollout_timeout_s, _SLOWER_START * client.start_s)
        await client.open()
        self._hello()
        async with self._loading:  # it has the last weights when its first call begins
            if (parcel := self._weights.everything()) is not None:
                await self._deliver(parcel)
            client.serves = True
        self.use_threads(self.threads)
        client.extend(self._calls.requests())
        async for reply in client.replies():
            self._counters.set(reply["stats"])
            self._failures = 0
            self._calls.settle(reply)

    def _replace_process(self, code: int) -> None:
        """The process died with this exit code: start the next one."""
        self._failures += 1
        self.num_restarts += 1
        self._counters.on_death()
        if self._failures > _MAX_RESTARTS:
            raise EngineDied(f"the engine process died {self._failures} times in a row (exit code {code})")
        self._calls.give_back(self._calls.interrupted())
        logger.warning(
            f"the engine process died (exit code {code}): it is started again, and {len(self._calls)} rollouts"
            " go on from their last segment"
        )
        self._client = EngineClient(self.config, self.threads)

    async def _ask(self, op: str, *, file: int | None = None, **values: Any) -> dict[str, Any]:
        """The answer; {} if the process is gone, or hangs and is killed: the next one is told at its start."""
        client, limit_s = self._client, self.config.watchdog.rollout_timeout_s or None
        try:
            return await client.ask(op, limit_s=limit_s, file=file, **values)
        except TimeoutError:
            logger.warning(f"watchdog: the engine process has not answered for {limit_s:.3g} s: it is killed")
            client.kill()
        except ConnectionError:
            client.kill()
        return {}

    async def _deliver(self, parcel: Parcel) -> None:
        await self._ask("load", file=parcel.file, parcel=parcel.message)

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
        number, answer = self._calls.begin(request)
        if self._client.serves:
            self._client.extend({number: request})
        try:
            return await answer
        except asyncio.CancelledError:
            self._calls.forget(number)
            self._client.cancel(number)
            raise

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        wanted = None if rollout_ids is None else set(rollout_ids)
        numbers = self._calls.of(wanted)
        if not self._client.serves:
            self._calls.give_back(numbers)
            return
        self._calls.mark_interrupted(numbers)
        self._client.tell({"op": "interrupt", "ids": None if wanted is None else sorted(wanted)})

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        found = await self._ask_of_calls("progress", rollout_ids)
        return {rollout_id: [segment_from_json(s) for s in segments] for rollout_id, segments in found.items()}

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        return set(await self._ask_of_calls("queued", rollout_ids))

    async def _ask_of_calls(self, op: str, rollout_ids: Iterable[str]) -> dict[str, list[Any]]:
        """Its answers, by rollout id, about those calls that were under way before it was asked and still are."""
        client, asked = self._client, self._calls.of(rollout_ids)
        found = (await self._ask(op, calls=list(asked))).get("calls", []) if client.serves and asked else []
        if not client.serves:
            return {}
        return {asked[number]: answer for number, answer in found if self._calls.waits(number)}

    def release(self, rollout_ids: Iterable[str]) -> None:
        self._client.tell({"op": "release", "ids": list(rollout_ids)})

    async def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightLoad:
        """See Engine. What runs goes on under the new weights after its current decode step."""
        started = time.perf_counter()
        async with self._loading:
            parcel = await asyncio.to_thread(self._weights.send, version, tensors)
            if self._client.serves:
                await self._deliver(parcel)
            self.oldest_version = version
        return WeightLoad(parcel.num_bytes, time.perf_counter() - started)

    def use_threads(self, num: int) -> None:
        """Decode with so many CPU threads from its next step on."""
        self.threads = num
        self._client.tell({"op": "threads", "num": num})

    def stats(self) -> dict[str, float]:
        """Counters as of the last extend that returned, over all processes; engine/restarts: how often one died."""
        if not self._counters:
            self._counters.set(self._hello()["stats"])
        return self._counters.total() | {"engine/restarts": float(self.num_restarts)}

    async def close(self) -> None:
        """End the process."""
        self._closing = True
        await self._client.end()
        if self._serving is not None:
            await asyncio.wait([self._serving])
        self._calls.cancel()
        self._weights.close()
