"""A checkpoint between begin and commit: its files come one by one.

Never decides what is in a file, nor where it lies: a CheckpointWriter does (local.py, remote.py), in an order that
holds whatever moment the process dies at (docs/checkpoint-format.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rollover.checkpoint.content import FileWriter
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

    def commit(self) -> None:
        """From now on readers see it."""
        with self._guard(self._writer.abort):
            self._writer.commit()
        self._on_commit()
