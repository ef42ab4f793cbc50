"""Messages over a socket pair: JSON objects, whose values may be numpy arrays.

    header: lengths of JSON and arrays, number of arrays ──▶ JSON, with placeholders of arrays ──▶ bytes of all arrays

No pickle; a float32 keeps its bits. numpy is imported only for messages with an array.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

_HEADER = struct.Struct("!QQI")
_ARRAY = "array:"  # the only key of an array's placeholder
MAX_BYTES = 1 << 40


class BadMessage(Exception):
    """Invalid bytes, or an invalid reply. The text completes "the reward worker ..."."""


def encode(message: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Return a message as the buffers that `Channel.send` writes. TypeError for other values."""
    arrays: list[memoryview] = []
    num_arrays = 0

    def place(value: object) -> object:
        import numpy as np

        nonlocal num_arrays
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a {type(value).__name__} cannot be sent")
        num_arrays += 1
        if value.nbytes:
            arrays.append(np.ascontiguousarray(value).data.cast("B"))
        return {_ARRAY: [value.dtype.str, list(value.shape)]}

    text = json.dumps(message, default=place).encode()
    return [_HEADER.pack(len(text), sum(array.nbytes for array in arrays), num_arrays) + text, *arrays]


class Channel:
    """One end of a connection. `max_bytes`: of the JSON, and of the arrays, of a received message.

    One thread may send while another one receives.
    """

    def __init__(self, end: socket.socket, max_bytes: int = MAX_BYTES) -> None:
        self._socket, self._max_bytes = end, max_bytes
        self._closing = threading.Lock()
        self._poll = select.poll()  # select.select fails for a descriptor above 1,023
        self._poll.register(end, select.POLLIN)

    def send(self, buffers: list[bytes | memoryview]) -> None:
        """Send an encoded message. Raises OSError if the connection is closed."""
        for buffer in buffers:
            self._socket.sendall(buffer)

    def receive(self) -> dict[str, Any]:
        """Wait for the next message. Raises OSError at the end of the connection, BadMessage."""
        text_bytes, array_bytes, num_arrays = _HEADER.unpack(self._read(_HEADER.size))
        if max(text_bytes, array_bytes) > self._max_bytes:
            raise BadMessage(f"sent a message of more than {self._max_bytes >> 20} MiB")
        try:
            text, arrays = self._read(text_bytes), self._read(array_bytes)
            # Without arrays, a user's object may look like a placeholder.
            message = json.loads(text, object_hook=_Restored(arrays) if num_arrays else None)
        except (ValueError, TypeError, LookupError, OverflowError, MemoryError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise BadMessage("sent an invalid message")
        return message

    def wait(self, limit_s: float) -> bool:
        """Return whether data or the end of the connection arrives within `limit_s`."""
        return bool(self._poll.poll(1000 * limit_s))

    def shut(self) -> None:
        """Shut down both directions; wakes threads that wait in `send` or `receive`."""
        with self._closing, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor. No thread may still send or receive: the number may be reused at once."""
        with self._closing:
            self._socket.close()

    def _read(self, num: int) -> bytearray:
        found = bytearray(num)
        view, have = memoryview(found), 0
        while have < num:
            got = self._socket.recv_into(view[have:], min(num - have, 1 << 30))
            if not got:
                raise ConnectionError("the other end is closed")
            have += got
        return found


class _Restored:
    """Object hook that restores the arrays of a message, in the order of their placeholders."""

    def __init__(self, data: bytearray) -> None:
        self._data, self._used = data, 0

    def __call__(self, value: dict[str, Any]) -> Any:
        if value.keys() != {_ARRAY}:
            return value
        import numpy as np

        dtype, shape = np.dtype(value[_ARRAY][0]), value[_ARRAY][1]
        count = math.prod(shape)
        array = np.frombuffer(self._data, dtype, count, self._used) if count else np.empty(0, dtype)
        self._used += array.nbytes
        return array.reshape(shape)
