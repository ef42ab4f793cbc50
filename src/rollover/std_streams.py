"""Standard output and error of a process that must not depend on who reads them.

Owns the streams that `keep_streams` puts in their place. Never decides what is printed.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import Any, NamedTuple, TextIO


class _File(io.FileIO):
    """The file below a standard stream. A write never fails: `lost` is the first error of one that did."""

    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # another process made it non-blocking, and it is full
                select.select([], [self], [])
            return written
        except OSError as error:
            self.lost = self.lost or error
            return memoryview(data).nbytes


class _Kept(NamedTuple):
    name: str
    stream: TextIO
    file: _File


_kept: dict[str, _Kept] = {}


def keep_streams() -> None:
    """Let no write to stdout or stderr of this process fail from here on: no reader, a full disk, a closed stream.

    A stream that other code put in the place of the process's own stays.
    """
    for number in range(3):  # a file that is opened later must not get the number of a closed stream
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for number, key, name in ((1, "stdout", "standard output"), (2, "stderr", "standard error")):
        old = getattr(sys, key)
        if old is not getattr(sys, f"__{key}__") or key in _kept:
            continue
        file, like = _File(number, "w", closefd=False), {}
        if old is not None:
            like = {of: getattr(old, of) for of in ("encoding", "errors", "line_buffering", "write_through")}
            with contextlib.suppress(OSError):
                old.flush()
        stream = io.TextIOWrapper(io.BufferedWriter(file), **like)
        setattr(sys, key, stream)
        setattr(sys, f"__{key}__", stream)
        _kept[key] = _Kept(name, stream, file)


def report_lost_output() -> None:
    """Print which stream of `keep_streams` could not be written, and why, to one that can be."""
    for of in _kept.values():
        of.stream.flush()
    lost = [of for of in _kept.values() if of.file.lost is not None]
    for of in lost:
        for other in [other for other in _kept.values() if other not in lost]:
            why = of.file.lost and of.file.lost.strerror
            print(f"rollover: notice: {of.name} could not be written: {why}", file=other.stream, flush=True)
