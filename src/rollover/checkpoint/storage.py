"""Where the checkpoints of one run lie: what differs between a local folder (local.py) and a remote store (remote.py).

Knows the names of checkpoints and never their content.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rollover.checkpoint.entries import name_of
from rollover.checkpoint.writing import CheckpointWriter
from rollover.files import open_regular


class Storage(ABC):
    """Checkpoints below `root` of the fsspec file system `fs`; `dir` is what the user called it."""

    write_errors: tuple[type[Exception], ...]
    """What a write raises that fails for reasons of the disk or the store."""

    def __init__(self, fs: Any, root: str, dir: str) -> None:
        self.fs, self.root, self.dir = fs, root, dir

    @property
    @abstractmethod
    def local_folder(self) -> Path | None:
        """The folder, if it is one of this machine."""

    @property
    @abstractmethod
    def needs_room_in(self) -> str:
        """The local folder that a checkpoint is written to first."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[None]:
        """An error of the block, in reading or deleting, is one line for the user: a ValueError."""

    @abstractmethod
    def entries(self) -> list[str]:
        """Names of what lies in `root`, in order; [] where there is no such folder."""

    def names(self) -> set[str]:
        """The checkpoints that something lies there of, committed or not."""
        return {name for entry in self.entries() if (name := name_of(entry))}

    @abstractmethod
    def cut_off(self) -> set[str]:
        """Those of `names` that no later writer cleans up, should their own have died."""

    @abstractmethod
    def find(self, name: str) -> str | None:
        """Where a checkpoint lies, committed or not; None: nowhere."""

    def exists(self, path: str) -> bool:
        """Not `exists` of fsspec, which takes every error for a file that is not there."""
        try:
            self.fs.info(path)
        except FileNotFoundError:
            return False
        return True

    def read(self, path: str) -> bytes:
        """FileNotFoundError if there is no such file; ValueError for a local folder, device or pipe."""
        if self.local_folder is not None:
            with open_regular(path) as file:
                return file.read()
        return self.fs.cat_file(path)

    @abstractmethod
    def folder_for(self, source: str) -> str:
        """The local folder for the files of the checkpoint that lies at `source`; they are there after `fetch`."""

    @abstractmethod
    def fetch(self, source: str, file: str, path: str) -> None:
        """Bring one file of a checkpoint to its local path. FileNotFoundError where it is found to be missing."""

    @abstractmethod
    def begin(self, name: str) -> CheckpointWriter:
        """A place for the files of a new checkpoint."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a checkpoint; a process that is killed meanwhile leaves none that seems to be committed."""

    @abstractmethod
    def clean(self) -> None:
        """Remove what dead writers left; call it where no other process writes."""

    def at(self, entry: str) -> str:
        return f"{self.root}/{entry}"


def existing(folder: str) -> str:
    """The folder, or the nearest above it that exists."""
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder or "/"
