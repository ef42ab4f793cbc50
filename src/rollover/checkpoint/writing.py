"""A checkpoint between begin and commit: its files come one by one.

Never decides what is in a file, nor where it lies: a CheckpointWriter does (local.py, remote.py), in an order that
holds whatever moment the process dies at (docs/checkpoint-format.md).
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
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

    @abstractmethod
    def add(self, file: str, content: FileWriter) -> None: ...

    @abstractmethod
    def aside(self) -> AbstractContextManager[str]:
        """An empty folder for files before they are added, which all machines of the run see; removed at the end."""

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abort(self) -> None:
        """Leave everything as it was before."""


class PendingCheckpoint:
    """What `CheckpointStore.begin` gives: `add` the files, then `commit`.

    Until it is committed, earlier checkpoints, one of the same name included, are what readers see. An error ends it:
    what was written is removed. `guard(undo)` says an error of the disk in words; `on_commit` is called after it.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        guard: Callable[[Callable[[], None]], AbstractContextManager[None]],
        on_commit: Callable[[], None],
    ) -> None:
        self._writer, self._guard, self._on_commit = writer, guard, on_commit

    def add(self, file: str, content: FileWriter) -> None:
        """Write one file durably: its bytes, or a function that writes it at the local path it is given.

        `file`: its name, relative; `/` separates folders.
        """
        assert is_plain_name(file) and file not in (MANIFEST, COMMITTED), f"bad file name: {file!r}"
        with self._guard(self._writer.abort):
            self._writer.add(file, content)

    def add_folder(self, prefix: str, write: FolderWriter) -> None:
        """Add all files that `write` leaves in a folder and below it, each as `prefix` and its name in there.

        They are moved, not copied, where checkpoints lie on the file system of that folder. An error of `write` is one
        of the disk if it is an OSError; another is passed on, as a process that died must not be taken for that.
        """
        passed_on: BaseException | None = None
        with self._guard(self._writer.abort), self._writer.aside() as folder:
            try:
                write(folder)
            except OSError:
                raise
            except BaseException as error:
                passed_on = error
            else:
                self._take(prefix, folder)
        if passed_on is not None:
            self._writer.abort()
            raise passed_on

    def _take(self, prefix: str, folder: str) -> None:
        for source in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            file = prefix + source.relative_to(folder).as_posix()
            assert is_plain_name(file) and file not in self._writer.manifest, f"bad file name: {file!r}"
            self._writer.add(file, _mover(source))

    def commit(self) -> None:
        """From now on readers see it."""
        with self._guard(self._writer.abort):
            self._writer.commit()
        self._on_commit()


def _mover(source: Path) -> FileWriter:
    def move(path: str) -> None:
        shutil.move(source, path)

    return move
