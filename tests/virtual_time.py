"""Time that passes only when a test lets it: what waits, gives up and looks again does so alike on any machine."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")
_NOT_FOR_EVER_S = 120  # of real time: what takes so long is a bug


def at_once(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that waits for nothing, with an event loop or without."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise AssertionError("it waits")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while anything can run, and then goes at once to the next timer.

    `on_pass` is told of the seconds that pass. Nothing outside can be waited for: no process, no other thread.
    """

    def __init__(self, on_pass: Callable[[float], None] = lambda seconds: None) -> None:
        self._seconds, self._on_pass = 0.0, on_pass
        super().__init__(_Poll(self.let_pass))

    def time(self) -> float:
        return self._seconds

    def let_pass(self, seconds: float) -> None:
        """So long nothing runs: between two turns of the loop, or within one of them, which then takes so long."""
        self._seconds += seconds
        self._on_pass(seconds)


class _Poll(selectors.DefaultSelector):
    def __init__(self, let_pass: Callable[[float], None]) -> None:
        super().__init__()
        self._let_pass = let_pass

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("everything waits, and for no timer: in real time that would be for ever")
        if timeout > 0:
            self._let_pass(timeout)
        return super().select(0)


def run(main: Coroutine[Any, Any, _T], on_pass: Callable[[float], None] = lambda seconds: None) -> _T:
    """asyncio.run on a VirtualLoop."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(on_pass)) as runner:
        return runner.run(main)


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop of real time, for real processes, that a test may send ahead once it knows that something hangs."""

    def __init__(self) -> None:
        self._skipped = 0.0
        super().__init__()

    def time(self) -> float:
        return super().time() + self._skipped

    def monotonic(self) -> float:
        """For what reads the clock itself."""
        return self.time()

    def skip(self, seconds: float) -> None:
        self._skipped += seconds

    async def skip_where_it_hangs(self, sign: Path, seconds: float) -> None:
        """As often as the file `sign` appears, which what hangs makes first. Until cancelled.

        What it had said before that comes first, as it would in 150 real seconds: otherwise it would be news.
        """
        while True:
            while not sign.exists():
                await asyncio.sleep(0.01)
            sign.unlink()
            for _ in range(10):  # what lies in a pipe is read, and whoever waits for it goes on
                await asyncio.sleep(0)
            self.skip(seconds)


class ThreadClock:
    """Stands in for the modules `time` and `threading` of something that waits in threads of its own."""

    TIMEOUT_MAX = threading.TIMEOUT_MAX

    def __init__(self) -> None:
        self.now = 0.0
        self.changed = threading.Condition()
        self.threads: list[threading.Thread] = []
        self.waiting: dict[threading.Thread, tuple[float, _Event]] = {}  # until when at the latest, and for what

    def monotonic(self) -> float:
        return self.now

    def Thread(self, **arguments: Any) -> threading.Thread:
        self.threads.append(threading.Thread(**arguments))
        return self.threads[-1]

    def Event(self) -> _Event:
        return _Event(self)

    @property
    def num_alive(self) -> int:
        return sum(thread.is_alive() for thread in self.threads)

    def let_pass(self, seconds: float) -> None:
        """Whoever waits no longer than that is woken at its time; returns when all have ended or wait again."""
        end = self.now + seconds
        self.settle()
        while due := [at for at, _ in self.waiting.values() if at <= end]:
            with self.changed:
                self.now = min(due)
                self.changed.notify_all()
            self.settle()
        self.now = end

    def settle(self) -> None:
        """Until all threads have ended or wait for what is still to come."""
        with self.changed:
            for _ in range(100 * _NOT_FOR_EVER_S):
                if self.changed.wait_for(self._all_wait, 0.01):  # the end of a thread changes nothing here
                    return
        raise AssertionError("a thread does not come to rest")

    def _all_wait(self) -> bool:
        def waits(thread: threading.Thread) -> bool:
            until, event = self.waiting.get(thread, (self.now, None))
            return until > self.now and event is not None and not event.is_set()

        return all(waits(thread) for thread in self.threads if thread.is_alive())


class _Event:
    def __init__(self, clock: ThreadClock) -> None:
        self._clock, self._is_set = clock, False

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        self._is_set = False

    def set(self) -> None:
        with self._clock.changed:
            self._is_set = True
            self._clock.changed.notify_all()

    def wait(self, timeout: float) -> bool:
        clock, me = self._clock, threading.current_thread()
        with clock.changed:
            until = clock.now + timeout
            clock.waiting[me] = until, self
            clock.changed.notify_all()
            clock.changed.wait_for(lambda: self._is_set or clock.now >= until)
            del clock.waiting[me]
            return self._is_set
