"""JSON lines over one end of a socket pair, for processes of ranks. No torch."""

from __future__ import annotations

import json
import socket
import time
from typing import Any


class Channel:
    """JSON lines over one end of a socket pair; a message may carry one open file, and bytes may follow it. Knows
    nothing of their meaning."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = b""
        self._files: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether a message, or its beginning, was received together with an earlier one."""
        return bool(self._buffer)

    def send(self, message: dict[str, Any], *, file: int | None = None, limit_s: float | None = None) -> None:
        """TimeoutError if the other end takes nothing for `limit_s` (None: no limit), ConnectionError if it is gone."""
        line = json.dumps(message).encode() + b"\n"
        self._socket.settimeout(limit_s)
        if file is not None:
            line = line[socket.send_fds(self._socket, [line], [file]) :]
        self._socket.sendall(line)

    def receive(self, limit_s: float | None = None) -> dict[str, Any]:
        """The next message. TimeoutError if it is not there whole within `limit_s`, ConnectionError at the end."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            data, files, _, _ = socket.recv_fds(self._socket, 2**16, 1)
            if not data:
                raise ConnectionError("the other end is closed")
            self._buffer += data
            self._files += files
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def send_bytes(self, data: memoryview, limit_s: float | None = None) -> None:
        """What the message before has announced. Errors as of `send`."""
        self._socket.settimeout(limit_s)
        self._socket.sendall(data)

    def receive_bytes(self, num: int, limit_s: float | None = None) -> bytearray:
        """The `num` bytes that follow the message before. TimeoutError if the other end sends nothing for `limit_s`,
        ConnectionError at the end."""
        found = bytearray(num)
        have = min(num, len(self._buffer))
        found[:have], self._buffer = self._buffer[:have], self._buffer[have:]
        view = memoryview(found)
        self._socket.settimeout(limit_s)
        while have < num:
            got = self._socket.recv_into(view[have:])
            if not got:
                raise ConnectionError("the other end is closed")
            have += got
        return found

    def take_file(self) -> int | None:
        """The file that came with the message, if one did; the caller closes it."""
        return self._files.pop(0) if self._files else None

    def close(self) -> None:
        self._socket.close()
