"""The folder of a local Ray cluster, and a cleanup process that outlives the run.

Ray's daemons end with the driver. Two agents of each node keep running, and keep their ports, for a minute or more. The
cleanup process records the driver's descendants while it lives. After the driver's death it kills those still alive,
and processes with the cluster's folder in their options. Imports nothing heavy.
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

import psutil

from rollover.process_tree import descendants, is_running, kill
from rollover.processes import child_environment

_PREFIX = "rollover-ray-"
_LOOK_EVERY_S = 0.5
_KILL_S = 10.0


class LocalRay:
    """The folder of a local Ray cluster: its sockets and logs. It is in /tmp, as names of sockets must be short.

    If this process is killed, the cleanup process removes the folder and kills Ray's processes.
    """

    def __init__(self) -> None:
        self.folder = Path("/tmp") / f"{_PREFIX}{os.getpid()}"
        shutil.rmtree(self.folder, ignore_errors=True)  # left by an earlier process with this pid
        self._cleanup = start_cleanup(str(self.folder))

    def kill(self) -> None:
        """Kill Ray's processes and their descendants, after ray.shutdown() timed out."""
        found = processes_with_folder(str(self.folder))
        kill(found.union(*(descendants(root.pid) for root in found)))

    def end(self, logs: Path) -> None:
        """Copy Ray's logs to `logs`/ray, and remove the folder."""
        end_cleanup(self._cleanup)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(self.folder / "session_latest" / "logs", logs / "ray", dirs_exist_ok=True, symlinks=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def start_cleanup(folder: str) -> subprocess.Popen[bytes]:
    """Start the cleanup process for this process. It removes `folder`. `end_cleanup` stops it."""
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), folder]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=child_environment(),
        start_new_session=True,  # not affected by Ctrl-C or a kill of the process group
    )


def end_cleanup(process: subprocess.Popen[bytes]) -> None:
    """Stop the cleanup process after a clean shutdown."""
    process.kill()
    process.wait()


def main(driver: str, folder: str) -> None:
    """Wait for the driver's death, then kill its remaining processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    seen = set[psutil.Process]()
    while os.getppid() == int(driver):
        seen = set(filter(is_running, seen | descendants(int(driver))))
        time.sleep(_LOOK_EVERY_S)
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        seen |= processes_with_folder(folder)  # orphans started since
        left = set(filter(is_running, seen)) - {psutil.Process()}
        if not left:
            break
        seen = left.union(*(descendants(process.pid) for process in left))
        kill(left)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def processes_with_folder(folder: str) -> set[psutil.Process]:
    """Return processes with an option (--name=PATH) in this folder, as all of Ray's have. Excludes readers of logs."""
    found = psutil.process_iter(["cmdline"])
    return {process for process in found if f"={folder}/" in "\0".join(process.info["cmdline"] or ())}


if __name__ == "__main__":
    main(*sys.argv[1:])
