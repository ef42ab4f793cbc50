"""A checkpoint between begin and commit: its files come one by one.

Never decides what is in a file. The CheckpointWriters (local.py, remote.py) decide where files lie, and write them in
an order that survives the death of the process at any moment (docs/checkpoint-format.md).
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rollover.checkpoint.content import FileWriter, FolderWriter
from rollover.checkpoint.entries import is_plain_name

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"


class CheckpointWriter(ABC):
    """Where the files of one checkpoint go. What is committed is complete, and what is not is invisible."""

    def __init__(self) -> None:
        self.manifest: dict[str, dict[str, Any]] = {}
        """Size and hash of the files that were added so far."""
        self.not_of_disk: BaseException | None = None
        """A FolderWriter's error that is not one of the disk: the death of a process must not read as a full disk."""

    @abstractmethod
    def add(self, file: str, content: FileWriter) -> None:
        """Write one file durably. `file`: its name, relative; `/` separates folders."""

    def add_folder(self, prefix: str, write: FolderWriter) -> None:
        """Add all files that `write` leaves in a folder and below it, each as `prefix` and its name in there.

        They are moved, not copied, where checkpoints lie on the file system of that folder. An error of `write` that is
        no OSError is kept in `not_of_disk`.
        """
        with self.aside() as folder:
            try:
                write(folder)
            except OSError:
                raise
            except BaseException as error:
                self.not_of_disk = error
                raise
            for source in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                file = prefix + source.relative_to(folder).as_posix()
                assert is_plain_name(file) and file not in self.manifest, f"bad file name: {file!r}"
                self.add(file, _mover(source))

    @abstractmethod
    def aside(self) -> AbstractContextManager[str]:
        """An empty folder for files before they are added, which all machines of the run see; removed at the end."""

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abort(self) -> None:
        """Leave everything as it was before."""


def _mover(source: Path) -> FileWriter:
    def move(path: str) -> None:
        shutil.move(source, path)

    return move
