"""A process that outlives a run which started a Ray, and then ends what Ray leaves behind.

Ray's daemons end with the driver; two agents of each node do so a minute or more later, as they try to reach the
daemons first, and keep their ports until then. What the driver started, and what that started, is looked at while the
driver lives; what of it still lives after the driver's death is killed, and so is what a daemon started since and left
behind, which has the folder of that Ray among its options. Owns nothing else; imports nothing heavy.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import psutil

from rollover.process_tree import descendants, is_running, kill
from rollover.processes import child_environment

_LOOK_EVERY_S = 0.5
_KILL_S = 10.0


def start_cleanup(folder: str) -> subprocess.Popen[bytes]:
    """Of this process; `folder` is removed with what is killed. `end_cleanup` if nothing is to be done."""
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), folder]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=child_environment(),
        start_new_session=True,  # Ctrl-C, and a kill of the whole group, are not for it
    )


def end_cleanup(process: subprocess.Popen[bytes]) -> None:
    """Everything has ended in order."""
    process.kill()
    process.wait()


def main(driver: str, folder: str) -> None:
    """Watch until the driver is gone, then kill what of it is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    seen = set[psutil.Process]()
    while os.getppid() == int(driver):
        seen = set(filter(is_running, seen | descendants(int(driver))))
        time.sleep(_LOOK_EVERY_S)
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        seen |= processes_of(folder)  # that were started since, and have no parent any more
        left = set(filter(is_running, seen)) - {psutil.Process()}
        if not left:
            break
        seen = left.union(*(descendants(process.pid) for process in left))
        kill(left)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: str) -> set[psutil.Process]:
    """Those with an option (--name=PATH) that names a file of this folder, as all that Ray starts has at first. Not who
    reads a log there."""
    found = psutil.process_iter(["cmdline"])
    return {process for process in found if f"={folder}/" in "\0".join(process.info["cmdline"] or ())}


if __name__ == "__main__":
    main(*sys.argv[1:])
