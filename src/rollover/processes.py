"""Child processes: how one of ours is started, and that it does not outlive its parent. Starts none itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_POLL_PARENT_S = 0.5


def child_command(module: str, *arguments: object) -> list[str]:
    """The command line of `module` in a child: its first argument is this process's id, for `die_with`."""
    # -P: a json.py in the working directory must not replace the standard library's in our own imports.
    return [sys.executable, "-P", "-m", module, *map(str, (os.getpid(), *arguments))]


def child_environment(**defaults: str) -> dict[str, str]:
    """This process's variables, above `defaults`; the child imports the same package as this process."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {**defaults, **os.environ, "PYTHONPATH": path}


def die_with(parent: int) -> None:
    """SIGKILL this process when `parent` dies: by the kernel on Linux, by a thread that watches getppid anywhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_PARENT_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
