"""Removes a folder when whoever holds its lock has ended, however that was: a program of its own, run beside it.

    python remover.py FOLDER LOCK      LOCK: the file in FOLDER that is locked (flock) while the owner lives

The kernel releases the lock of a process that was killed, which is what is waited for. Standard library only: it starts
in milliseconds, and takes little room.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys


def main(folder: str, lock: str) -> None:
    """Wait, and remove the folder if it is still there."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # told to end beside its owner, it ends after it
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open(os.path.join(folder, lock), "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
