"""A pool of members that fail and are restarted (servers of an engine, nodes of reward workers), and a queue for it.

    start ──▶ life of a member ──failed──▶ on_failure ──exponential backoff──▶ life again
    place(call) ──in order──▶ a place, as soon as `choose` finds one ──▶ move when there may be another

Owns one task a member, and the waiting calls. An error in such a task ends the queue: the member is not restarted.
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
    """Calls that wait for a place, in order. `choose`: takes a place for a call, or None where there is none yet;
    `free`: frees one that was taken."""

    def __init__(self, choose: Callable[[Call], Slot | None], free: Callable[[Slot], None]) -> None:
        self._choose, self._free = choose, free
        self._waiting: list[_Waiting[Call, Slot]] = []
        self._numbers = itertools.count()
        self._error: BaseException | None = None

    def number(self) -> int:
        """Return a number in the order of arrival: a call that keeps it is placed before those that came later."""
        return next(self._numbers)

    async def place(self, call: Call, number: int | None = None, until: asyncio.Event | None = None) -> Slot | None:
        """Return a place. None if `until` is set first, or the queue ended. Raises the error of `end`."""
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
        """The call that had this place has ended."""
        self._free(place)
        self.move()

    def move(self) -> None:
        """Slot the calls that wait, in their order: there may be room."""
        for waiting in list(self._waiting):
            if (place := self._choose(waiting.call)) is not None:
                self._waiting.remove(waiting)
                waiting.place.set_result(place)

    def check(self) -> None:
        """Raise the error of `end`."""
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException | None) -> None:
        """Calls that wait, and those to come, raise this error. None: those that wait get no place."""
        self._error = self._error or error
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if error is None:
                each.place.set_result(None)
            else:
                each.place.set_exception(error)


class Pool(Generic[Member]):
    """Restarts each of `members` whenever it fails.

    life: starts one, calls its argument when it works, and returns why it failed ("": that is known already).
    on_failure: releases one; it gets the reason, and whether that differs from the last one.
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
        """Start all members, and `others`, whose error ends the queue as well."""
        self._tasks = [asyncio.ensure_future(work) for work in (*map(self._keep, self.members), *others)]
        for task in self._tasks:
            task.add_done_callback(self._on_end)

    async def close(self) -> None:
        """Start no member again."""
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
    """Whether the event is set in time."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)
        return True
    return False
