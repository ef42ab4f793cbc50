"""Child processes that do not outlive their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_PARENT_S = 0.5


def die_with(parent: int) -> None:
    """SIGKILL this process when `parent` dies: by the kernel on Linux, by a thread that watches getppid anywhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_PARENT_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
