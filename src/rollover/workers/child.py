"""The child's end of a `Worker` (worker.py)."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

from rollover.functions import explained
from rollover.workers.framing import MAX_BYTES, Channel, encode


class ReplyTooLong(ValueError):
    """The reply exceeds `max_bytes`, and was not sent."""


class Calls:
    """Iterator over the parent's calls until the connection ends. Each call gets one or more replies.

    The connection is the standard input, which this class takes over: prints of other code go to standard error, and
    reads find an empty file. A process that user code forks, and that returns from the user's function, ends at its
    first reply.

    `max_bytes`: of a reply.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._channel, self._max_bytes = Channel(socket.socket(fileno=os.dup(0))), max_bytes
        self._pid = os.getpid()
        self.call = 0
        """Number of the current call; 0 for a message without a reply."""
        os.dup2(2, 1)
        with open(os.devnull) as null:
            os.dup2(null.fileno(), 0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            try:
                message = self._channel.receive()
            except OSError:
                return
            self.call = message.pop("call", 0)
            yield message

    def reply(self, **message: Any) -> None:
        """Reply to the current call. Ends the process if the parent has ended. Raises ReplyTooLong."""
        self.reply_to(self.call, **message)

    def reply_to(self, number: int, /, **message: Any) -> None:
        """Reply to call `number`, for a child that takes further calls before it replies."""
        if os.getpid() != self._pid:
            os._exit(0)
        buffers = encode(message | {"call": number})
        if (longest := max(map(len, buffers))) > self._max_bytes:
            raise ReplyTooLong(f"{longest / 2**20:.0f} MiB long, above {self._max_bytes >> 20} MiB")
        try:
            self._channel.send(buffers)
        except OSError:
            os._exit(0)


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return a reply with the error that user code raised."""
    failure: dict[str, Any] = {"error": explained(error)}
    return failure | {"out_of_memory": True} if isinstance(error, MemoryError) else failure


def clear_alarm() -> None:
    """Clear a pending alarm of user code, which would kill a later call."""
    signal.setitimer(signal.ITIMER_REAL, 0)
