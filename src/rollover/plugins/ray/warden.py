"""A process that outlives a run which started a Ray, and then ends what Ray leaves behind.

Ray's daemons end with the driver; two agents of each node do so a minute or more later, as they try to reach the
daemons first, and keep their ports until then. What the driver started, and what that started, is looked at while the
driver lives; what of it still lives after the driver's death is killed, and so is what a daemon started since and left
behind, which has the folder of that Ray among its options. Owns nothing else; imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rollover.processes import child_environment, descendants, started_at

_LOOK_EVERY_S = 0.5
_KILL_S = 10.0


def start_warden(folder: str) -> subprocess.Popen[bytes]:
    """Of this process; `folder` is removed with what is killed. `end_warden` if nothing is to be done."""
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), folder]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=child_environment(),
        start_new_session=True,  # Ctrl-C, and a kill of the whole group, are not for it
    )


def end_warden(warden: subprocess.Popen[bytes]) -> None:
    """Everything has ended in order."""
    warden.kill()
    warden.wait()


def main(driver: str, folder: str) -> None:
    """Watch until the driver is gone, then kill what of it is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    seen: dict[int, int] = {}  # process id -> when it was started: an id may be another's later
    while os.getppid() == int(driver):
        _look(seen, [int(driver)])
        time.sleep(_LOOK_EVERY_S)
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        _note(seen, processes_of(folder))  # that were started since, and have no parent any more
        left = [pid for pid, began in seen.items() if started_at(pid) == began]
        if not left:
            break
        _look(seen, left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: str) -> set[int]:
    """Those with an option (--name=PATH) that names a file of this folder, as all that Ray starts has at first. Not who
    reads a log there."""
    found = set[int]()
    for pid in filter(str.isdigit, os.listdir("/proc")) if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):
            if os.fsencode(f"={folder}/") in Path("/proc", pid, "cmdline").read_bytes():
                found.add(int(pid))
    return found


def _look(seen: dict[int, int], roots: list[int]) -> None:
    _note(seen, {pid for root in roots for pid in descendants(root)})


def _note(seen: dict[int, int], pids: set[int]) -> None:
    for pid in pids - {os.getpid()}:
        if (began := started_at(pid)) is not None:
            seen[pid] = began


if __name__ == "__main__":
    main(*sys.argv[1:])
