"""A process that outlives a run which started a Ray, and then ends what Ray leaves behind.

Ray's daemons end with the driver; two agents of each node do so a minute or more later, as they try to reach the
daemons first, and keep their ports until then. What the driver started, and what that started, is looked at while the
driver lives; what of it still lives after the driver's death is killed. Owns nothing else; imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

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
        left = [pid for pid, began in seen.items() if started_at(pid) == began]
        if not left:
            break
        _look(seen, left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def _look(seen: dict[int, int], roots: list[int]) -> None:
    for pid in {pid for root in roots for pid in descendants(root)} - {os.getpid()}:
        if (began := started_at(pid)) is not None:
            seen[pid] = began


if __name__ == "__main__":
    main(*sys.argv[1:])
