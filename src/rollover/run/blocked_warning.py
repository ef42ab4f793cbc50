"""The alarm: speaks up from a thread of its own while the main thread is held up and cannot.

Owns one daemon thread for each block that it watches. It names what holds the run up and for how long; it can end
nothing, and it is silent too while a library holds the interpreter's lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Alarm:
    """`say` prints one line; it is called in the alarm's thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    @contextmanager
    def over(self, text: Callable[[float], str], limit_s: float) -> Iterator[Callable[[], None]]:
        """Say `text(seconds)` when the block takes longer than `limit_s` (0: never), and again at doubling times.

        Gives a function: each call of it starts the time anew.
        """
        if limit_s == 0:
            yield lambda: None
            return
        heard = threading.Event()
        ended = threading.Event()
        thread = threading.Thread(target=self._listen, args=(text, limit_s, heard, ended), daemon=True, name="alarm")
        thread.start()
        try:
            yield heard.set
        finally:
            ended.set()
            heard.set()

    @contextmanager
    def over_loop(
        self, text: Callable[[float], str], limit_s: float, call_later: Callable[[float, Callable[[], None]], Any]
    ) -> Iterator[None]:
        """The same for an event loop that stands still, whose `call_later` it is. Waiting alone does not count."""
        handle: Any = None

        def beat() -> None:
            nonlocal handle
            restart()
            handle = call_later(limit_s / 4, beat)

        with self.over(text, limit_s) as restart:
            if limit_s:
                beat()
            try:
                yield
            finally:
                if handle is not None:
                    handle.cancel()

    def _listen(
        self, text: Callable[[float], str], limit_s: float, heard: threading.Event, ended: threading.Event
    ) -> None:
        since, wait = time.monotonic(), limit_s
        while True:
            restarted = heard.wait(min(wait, threading.TIMEOUT_MAX))
            if ended.is_set():
                return
            if restarted:
                heard.clear()
                since, wait = time.monotonic(), limit_s
            else:
                wait = time.monotonic() - since  # the next time at the double
                self._say(f"watchdog: {text(wait)}")
