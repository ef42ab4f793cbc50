"""Child process that removes a folder when the owner of its lock has ended, even by SIGKILL.

    python remover.py FOLDER LOCK      LOCK: the file in FOLDER that is locked (flock) while the owner lives

It waits for the lock, which the kernel releases when the owner ends. Standard library only: it starts in milliseconds,
and takes little memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys


def main(folder: str, lock: str) -> None:
    """Wait for the lock, and remove the folder if it still exists."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # sent to the owner as well: end after it
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open(os.path.join(folder, lock), "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
