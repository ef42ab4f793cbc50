"""Log file of a child process's output: appended to at each start, bounded in size."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import IO

_MOST_BYTES = 8 << 20
_LAST_LINES = 5
_STARTED = "--- started "


class LogFile:
    """The log file `path`. Above `most_bytes` it is moved to `<path>.1`, and starts empty."""

    def __init__(self, path: Path, most_bytes: int = _MOST_BYTES) -> None:
        self.path, self._most_bytes = path, most_bytes

    def open(self) -> IO[bytes]:
        """Open the file for a process that starts now."""
        self.bound()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab")
        file.write(f"{_STARTED}{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        file.flush()
        return file

    def bound(self) -> None:
        """Bound the size. Call it at intervals while a process writes; output of that moment may be lost."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_size > self._most_bytes:
                shutil.copyfile(self.path, self.path.with_name(self.path.name + ".1"))
                with self.path.open("r+b") as file:  # truncated, not replaced: the process has it open
                    file.truncate(0)

    def last_words(self) -> str:
        """Return the last lines since the last start; "" if there are none."""
        text = ""
        with contextlib.suppress(OSError):
            with self.path.open("rb") as file:
                file.seek(max(0, self.path.stat().st_size - 2**16))
                text = file.read().decode(errors="replace")
        lines = text.rpartition(_STARTED)[2].splitlines()
        return "\n".join((lines[1:] if _STARTED in text else lines)[-_LAST_LINES:])
