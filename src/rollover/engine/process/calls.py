"""The `extend` calls under way of an engine in another process, and what becomes of each. No process, no pipe."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rollover.engine.process.wire import segment_from_json
from rollover.engine.protocol import ExtendRequest
from rollover.types import Segment


@dataclass(eq=False)
class _Call:
    request: ExtendRequest
    future: asyncio.Future[list[Segment]]
    interrupted: bool = False
    """Should its process die, it returns with what it began with."""


class Calls:
    """Every call has a number, which is never used again: an answer can only be that of its own call."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, request: ExtendRequest) -> tuple[int, asyncio.Future[list[Segment]]]:
        """Note a new call: its number, and what its caller waits for."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        call = self._calls[number] = _Call(request, asyncio.get_running_loop().create_future())
        return number, call.future

    def requests(self) -> dict[int, ExtendRequest]:
        """Of all calls under way, by their numbers."""
        return {number: call.request for number, call in self._calls.items()}

    def of(self, rollout_ids: Iterable[str] | None) -> dict[int, str]:
        """The calls for these rollouts (None: for all): rollout id by number."""
        wanted = None if rollout_ids is None else set(rollout_ids)
        ids = {number: call.request.rollout_id for number, call in self._calls.items()}
        return {number: rollout_id for number, rollout_id in ids.items() if wanted is None or rollout_id in wanted}

    def waits(self, number: int) -> bool:
        """Whether the call has no answer yet."""
        return number in self._calls and not self._calls[number].future.done()

    def settle(self, reply: dict[str, Any]) -> None:
        """The process answered: with segments, or with an error that is raised here."""
        call = self._calls.pop(reply["call"], None)
        if call is None or call.future.done():
            return
        if "segments" in reply:
            call.future.set_result([segment_from_json(s) for s in reply["segments"]])
        else:
            call.future.set_exception((ValueError if reply["user"] else RuntimeError)(reply["error"]))

    def mark_interrupted(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._calls[number].interrupted = True

    def interrupted(self) -> list[int]:
        return [number for number, call in self._calls.items() if call.interrupted]

    def give_back(self, numbers: Iterable[int]) -> None:
        """No process has these calls, and they were interrupted: they return with what they began with."""
        for number in numbers:
            call = self._calls.pop(number)
            if not call.future.done():
                call.future.set_result(call.request.nothing())

    def forget(self, number: int) -> None:
        """Nobody waits for this call any more."""
        self._calls.pop(number, None)

    def fail(self, error: Exception) -> None:
        """No process will ever answer: every call raises this."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(error)

    def cancel(self) -> None:
        for call in self._calls.values():
            call.future.cancel()
