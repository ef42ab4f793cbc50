"""What every worker process does that runs code of the user's: its pipes, and what a failure is."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any, TextIO

from rollover.functions import explained
from rollover.rewards.wire import line_of


class Replies:
    """The end of the channel that replies go out by. `call`: the present one, which every reply names.

    A copy of the process that the user's code forked, and that comes back out of it, ends at its first reply: neither
    that nor the next request are for it.
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self._pid = file, os.getpid()
        self.call = 0

    def send(self, message: Mapping[str, Any]) -> None:
        if os.getpid() != self._pid:
            os._exit(0)
        self._file.write(line_of({"call": self.call, **message}))
        self._file.flush()


def private_pipes() -> tuple[TextIO, Replies]:
    """Requests and replies. The user's code may print and read: its fd 1 is stderr from now on, and its fd 0 empty."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    return requests, Replies(replies)


def failure_of(error: BaseException) -> dict[str, Any]:
    """A reply that says what the user's code raised."""
    failure: dict[str, Any] = {"error": explained(error)}
    return failure | {"out_of_memory": True} if isinstance(error, MemoryError) else failure


def clear_alarm() -> None:
    """One that a function left pending would kill a later call."""
    signal.setitimer(signal.ITIMER_REAL, 0)
