"""A lock on a run's directory, so that one process at a time writes there. It ends with the process.

Owns the file `lock` in the directory, which names its holder. The lock itself is the operating system's (flock), so the
file of a killed run locks nothing. On a network file system it works between machines where the mount has locks (NFS
has, unless mounted with nolock); without locks the run continues with a warning.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
from pathlib import Path
from typing import BinaryIO

from rollover.files import open_regular

LOCK = "lock"
_MOST_BYTES = 1 << 12
_TRIES, _PAUSE_S = 5, 0.02
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class DirectoryLock:
    """A lock on the existing `folder` until `release`. ValueError, which names the holder, if another run has it.

    `key`: the option that named the folder.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._file = open(folder / LOCK, "ab+")
        try:
            self._lock()
        except BlockingIOError:
            holder = _holder_in(self._file)
            self._file.close()
            raise ValueError(
                f"{key} = {str(folder)!r} is in use by {holder}: wait until that run has ended, stop it (Ctrl-C), or"
                f" give another {key}"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self._file.close()
                raise
            warnings.warn(f"{folder} cannot be locked ({error}): start no second run in it", stacklevel=2)
        self._file.truncate(0)
        who = f"process {os.getpid()} on {socket.gethostname()} (since {time.strftime('%F %T')})\n"
        self._file.write(who.encode("utf-8", "replace"))
        self._file.flush()

    def release(self) -> None:
        self._file.close()

    def _lock(self) -> None:
        """Raise BlockingIOError where another run has it. `holder_of` takes it for an instant, so try again."""
        for _ in range(_TRIES):
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_PAUSE_S)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def holder_of(folder: Path) -> str:
    """Return a description of the process whose run holds the folder; "" where none does, or without locks."""
    try:
        with open_regular(folder / LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _holder_in(file)
    except (OSError, ValueError):  # no such file, a pipe in its place, or no locks there
        pass
    return ""


def _holder_in(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(_MOST_BYTES).decode("utf-8", "replace").strip() or "another process"
