"""Says that a run is still busy with something, where nothing else shows that it is alive.

Owns the pauses: after `first_s` of one thing, then whenever it has taken twice as long. Never knows what is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Heartbeat:
    """`say(seconds)` is called in a thread of its own, with how long the present thing has taken."""

    def __init__(self, say: Callable[[float], None], first_s: float = 30.0) -> None:
        self._say, self._first_s = say, first_s
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Something else is done from now on."""
        self.end()
        self._wait(0.0, self._first_s)

    def end(self) -> None:
        """Nothing is done any more."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _wait(self, so_far: float, pause: float) -> None:
        with self._lock:
            timer = self._timer = threading.Timer(pause, lambda: self._again(timer, so_far + pause))
            timer.daemon = True
            timer.start()

    def _again(self, timer: threading.Timer, so_far: float) -> None:
        with self._lock:
            if self._timer is not timer:
                return  # it ended meanwhile
        self._say(so_far)
        with self._lock:
            if self._timer is not timer:
                return
        self._wait(so_far, so_far)
