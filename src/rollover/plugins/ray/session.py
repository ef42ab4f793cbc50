"""The folder of a Ray that a run starts: its sockets and logs, which no other Ray of this machine shares."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from rollover.plugins.ray.cleanup import end_cleanup, processes_of, start_cleanup
from rollover.process_tree import descendants, kill

_PREFIX = "rollover-ray-"


class OwnSession:
    """`folder` is in /tmp: names of sockets must be short, and TMPDIR may not be. If this process is killed, the
    cleanup process removes the folder and ends what Ray leaves behind."""

    def __init__(self) -> None:
        self.folder = Path("/tmp") / f"{_PREFIX}{os.getpid()}"
        shutil.rmtree(self.folder, ignore_errors=True)  # of a process of that number, before this one
        self._cleanup = start_cleanup(str(self.folder))

    def kill(self) -> None:
        """Ray's processes, which do not end when they are told to, and all that these have started."""
        found = processes_of(str(self.folder))
        kill(found.union(*(descendants(root.pid) for root in found)))

    def end(self, logs: Path) -> None:
        """Keep what Ray wrote, as `logs`/ray."""
        end_cleanup(self._cleanup)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(self.folder / "session_latest" / "logs", logs / "ray", dirs_exist_ok=True, symlinks=True)
        shutil.rmtree(self.folder, ignore_errors=True)
