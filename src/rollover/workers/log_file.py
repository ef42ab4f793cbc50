"""The output of a child process: one file, appended to at each start, and bounded in size."""

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
    """The file `path`. When it has more than `most_bytes`, what is in it replaces `<path>.1`, and it begins again."""

    def __init__(self, path: Path, most_bytes: int = _MOST_BYTES) -> None:
        self.path, self._most_bytes = path, most_bytes

    def open(self) -> IO[bytes]:
        """For a process that is started now to append to."""
        self.bound()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab")
        file.write(f"{_STARTED}{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        file.flush()
        return file

    def bound(self) -> None:
        """Now and then while a process writes: what it writes at this very moment may be lost."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_size > self._most_bytes:
                shutil.copyfile(self.path, self.path.with_name(self.path.name + ".1"))
                with self.path.open("r+b") as file:  # not replaced: the process appends to this one
                    file.truncate(0)

    def last_words(self) -> str:
        """The last lines since it was started last; "" if it said nothing."""
        text = ""
        with contextlib.suppress(OSError):
            with self.path.open("rb") as file:
                file.seek(max(0, self.path.stat().st_size - 2**16))
                text = file.read().decode(errors="replace")
        lines = text.rpartition(_STARTED)[2].splitlines()
        return "\n".join((lines[1:] if _STARTED in text else lines)[-_LAST_LINES:])
