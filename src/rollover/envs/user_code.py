"""Calls of the user's code outside our event loop, each with a time limit: it may block, exit, hang or raise.

A `def` runs in its own thread, an `async def` on a shared event loop in another thread. A thread cannot be killed: one
that hangs is abandoned, counted, and does not use up the concurrency limit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rollover.functions import explained

MAX_CONCURRENT = 64
_PING_S = 1.0  # an event loop that does not answer in this time is blocked


@dataclass(frozen=True)
class Outcome:
    """Result of a call: its `value` or `error`. `limit_s`: its limit, if it timed out."""

    value: Any = None
    error: BaseException | None = None
    limit_s: float | None = None
    seconds: float = 0.0

    @property
    def timed_out(self) -> bool:
        return self.limit_s is not None

    @property
    def failed(self) -> bool:
        return self.error is not None or self.timed_out

    @property
    def why(self) -> str:
        """The error for the user, on one line, with file and line of the user's code."""
        if self.timed_out:
            return f"it did not come back within {self.limit_s:g} s (workflow.tool_timeout_s)"
        return "" if self.error is None else explained(self.error)


class UserCode:
    """Runs calls with a limit of `limit_s` each. `num_abandoned`: number of threads that timed out."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.num_abandoned = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Outcome:
        """Call `function`, await an awaitable result, and return the outcome. Never raises an error of user code."""
        async with self._slots():
            started = time.perf_counter()
            future = self._begin(function, args, kwargs)
            ended = asyncio.wrap_future(future)
            try:
                await asyncio.wait([ended], timeout=self.limit_s)
            finally:
                ended.cancel()  # an `async def` ends by this, a thread does not
                future.cancel()
            outcome = self._outcome(future, time.perf_counter() - started)
            if outcome.timed_out and self._loop is not None and inspect.iscoroutinefunction(function):
                await self._abandon_if_blocked(self._loop)
            return outcome

    def call_blocking(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Outcome:
        """Call `function` like `call`, but block until it is done."""
        started = time.perf_counter()
        future = self._begin(function, args, kwargs)
        concurrent.futures.wait([future], timeout=self.limit_s)
        future.cancel()
        return self._outcome(future, time.perf_counter() - started)

    # Private

    def _slots(self) -> asyncio.Semaphore:
        """Limit of concurrent calls, each of which may be a thread. Waiting for it does not count as a call's time."""
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:  # a program may step a run by several event loops
            self._semaphore = loop, asyncio.Semaphore(MAX_CONCURRENT)
        return self._semaphore[1]

    def _begin(self, function: Callable[..., Any], args: Any, kwargs: Any) -> concurrent.futures.Future[Any]:
        if inspect.iscoroutinefunction(function):
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="async tools", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(_guarded(function(*args, **kwargs)), self._loop)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        run = functools.partial(_run, future, function, args, kwargs)
        threading.Thread(target=run, name=f"tool {getattr(function, '__name__', '')}", daemon=True).start()
        return future

    def _outcome(self, future: concurrent.futures.Future[Any], seconds: float) -> Outcome:
        if not future.done() or future.cancelled():
            self.num_abandoned += not future.cancelled()
            return Outcome(limit_s=self.limit_s, seconds=seconds)
        value, error = future.result()
        return Outcome(value, error, seconds=seconds)

    async def _abandon_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        """Abandon the event loop if a call blocks it (time.sleep in an `async def`). Later calls get another one."""
        ping = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        await asyncio.wait([asyncio.wrap_future(ping)], timeout=_PING_S)
        if not ping.done() and self._loop is loop:
            self._loop = None
            self.num_abandoned += 1


_Ended = tuple[Any, BaseException | None]


def _run(
    future: concurrent.futures.Future[_Ended], function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> None:
    """Run the call in its thread and store its value or error, SystemExit included."""
    if not future.set_running_or_notify_cancel():
        return  # it timed out before the thread began
    try:
        value = function(*args, **kwargs)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
    except BaseException as error:  # boundary: the user's code
        future.set_result((None, error))
    else:
        future.set_result((value, None))


async def _awaited(value: Any) -> Any:
    return await value


async def _guarded(call: Coroutine[Any, Any, Any]) -> _Ended:
    task = asyncio.current_task()
    try:
        return await call, None
    except BaseException as error:  # boundary: the user's code
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # we cancelled it, not the user's code
        return None, error
