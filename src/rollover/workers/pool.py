"""A pool of members that fail and are restarted (servers of an engine, nodes of reward workers), and a queue for it.

    start ──▶ life of a member ──failed──▶ on_failure ──exponential backoff──▶ life again
    place(call) ──in order──▶ a slot, as soon as `choose` finds one

Owns one task per member, and the waiting calls. An error in such a task ends the queue: the member is not restarted.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollover.back_off import BackOff
from rollover.shutdown import end_tasks

Member = TypeVar("Member")
Call = TypeVar("Call")
Slot = TypeVar("Slot")


@dataclass(eq=False)
class _Waiting(Generic[Call, Slot]):
    number: int
    call: Call
    place: asyncio.Future[Slot | None]


class RequestQueue(Generic[Call, Slot]):
    """Calls that wait for a slot, in order. `choose`: takes a slot for a call, or returns None; `free`: frees it."""

    def __init__(self, choose: Callable[[Call], Slot | None], free: Callable[[Slot], None]) -> None:
        self._choose, self._free = choose, free
        self._waiting: list[_Waiting[Call, Slot]] = []
        self._numbers = itertools.count()
        self._error: BaseException | None = None

    def number(self) -> int:
        """Return a number in the order of arrival, which a call may keep over several waits."""
        return next(self._numbers)

    async def place(self, call: Call, number: int | None = None, until: asyncio.Event | None = None) -> Slot | None:
        """Wait for a slot. None if `until` is set first, or the queue ended. Raises the error of `end`."""
        self.check()
        future = asyncio.get_running_loop().create_future()
        waiting = _Waiting(self.number() if number is None else number, call, future)
        bisect.insort(self._waiting, waiting, key=lambda waiting: waiting.number)
        self.move()
        ending = None if until is None else asyncio.ensure_future(until.wait())
        try:
            await asyncio.wait([future, ending] if ending else [future], return_when=asyncio.FIRST_COMPLETED)
            return future.result() if future.done() else None
        except asyncio.CancelledError:
            if future.done() and not future.exception() and (place := future.result()) is not None:
                self.leave(place)
            raise
        finally:
            if ending is not None:
                ending.cancel()
            with contextlib.suppress(ValueError):
                self._waiting.remove(waiting)

    def leave(self, place: Slot) -> None:
        """Free the slot of a call that has ended."""
        self._free(place)
        self.move()

    def move(self) -> None:
        """Give free slots to the waiting calls, in order."""
        for waiting in list(self._waiting):
            if (place := self._choose(waiting.call)) is not None:
                self._waiting.remove(waiting)
                waiting.place.set_result(place)

    def check(self) -> None:
        """Raise the error of `end`."""
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException | None) -> None:
        """End the queue: waiting and later calls raise this error. None: waiting calls return None."""
        self._error = self._error or error
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if error is None:
                each.place.set_result(None)
            else:
                each.place.set_exception(error)


class Pool(Generic[Member]):
    """Supervisor that restarts each of `members` whenever it fails, with exponential backoff.

    life: runs a member, calls its argument when the member works, and returns why it failed ("": handled already).
    on_failure: releases a member; gets the reason, and whether it differs from the last one.
    """

    def __init__(
        self,
        members: Sequence[Member],
        life: Callable[[Member, Callable[[], None]], Awaitable[str]],
        on_failure: Callable[[Member, str, bool], Awaitable[None]],
        queue: RequestQueue[Any, Any],
    ) -> None:
        self.members, self._life, self._on_failure, self._queue = members, life, on_failure, queue
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def started(self) -> bool:
        return bool(self._tasks)

    def start(self, *others: Coroutine[Any, Any, None]) -> None:
        """Start all members, and `others`, whose errors end the queue as well."""
        self._tasks = [asyncio.ensure_future(work) for work in (*map(self._keep, self.members), *others)]
        for task in self._tasks:
            task.add_done_callback(self._on_end)

    async def close(self) -> None:
        """Stop supervising the members."""
        await end_tasks(self._tasks)

    async def _keep(self, member: Member) -> None:
        back_off = BackOff()
        while True:
            back_off.begin()
            why = await self._life(member, back_off.works)
            await self._on_failure(member, why, back_off.is_news(why))
            await asyncio.sleep(back_off.pause_s())

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._queue.end(error)


async def set_within(event: asyncio.Event, limit_s: float) -> bool:
    """Return whether the event is set within `limit_s`."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)
        return True
    return False
