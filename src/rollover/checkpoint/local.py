"""Checkpoints in a local folder, renamed into place when they are complete.

Owns the order of changes on disk (docs/checkpoint-format.md). One process writes at a time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from safetensors import SafetensorError

from rollover.checkpoint.storage import (
    COMMITTED,
    LEFTOVER,
    MANIFEST,
    CheckpointWriter,
    FileWriter,
    Storage,
    commit_text,
    fingerprint,
    leftover,
    manifest_text,
    produce,
)
from rollover.files import fsync_dir


class LocalStorage(Storage):
    """See Storage."""

    write_errors = (OSError, RuntimeError, SafetensorError)  # torch.save and safetensors have errors of their own

    @property
    def local_folder(self) -> Path:
        return Path(self.root)

    @property
    def needs_room_in(self) -> str:
        return self.root

    def reading(self) -> AbstractContextManager[None]:
        """Pass errors on: those of the operating system are clear."""
        return contextlib.nullcontext()

    def entries(self) -> list[str]:
        return sorted(os.listdir(self.root)) if os.path.isdir(self.root) else []

    def unclean(self) -> set[str]:
        """Return none: `clean` removes incomplete ones."""
        return set()

    def find(self, name: str) -> str | None:
        """Look for its name, and for a .old- entry of a writer that died between its renames."""
        if self.exists(self.at(name)):
            return self.at(name)
        for entry in self.entries():
            match = LEFTOVER.fullmatch(entry)
            if match and match[1] == "old" and match[2] == name:
                return self.at(entry)
        return None

    def folder_for(self, source: str) -> str:
        return source

    def fetch(self, source: str, file: str, path: str) -> None:
        """Do nothing: the file is local."""

    def begin(self, name: str) -> CheckpointWriter:
        os.makedirs(self.root, exist_ok=True)
        self.clean()
        return LocalWriter(self.root, name)

    def delete(self, name: str) -> None:
        # Renamed first: a kill in the middle of the deletion must not leave a committed but incomplete checkpoint.
        doomed = self.at(leftover("tmp", name))
        os.rename(self.at(name), doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def clean(self) -> None:
        """Undo a replacement that was killed between its two renames, and remove other leftovers of dead writers."""
        for entry in self.entries():
            match = LEFTOVER.fullmatch(entry)
            if match is None:
                continue
            kind, name = match[1], match[2]
            if kind == "old" and not os.path.lexists(self.at(name)):
                os.rename(self.at(entry), self.at(name))
            else:
                shutil.rmtree(self.at(entry), ignore_errors=True)


class LocalWriter(CheckpointWriter):
    """Writes a folder beside the final one, and renames it when it is complete."""

    def __init__(self, root: str, name: str) -> None:
        super().__init__()
        self._root = root
        self._temporary, self._aside, self._final = (
            f"{root}/{entry}" for entry in (leftover("tmp", name), leftover("old", name), name)
        )
        os.mkdir(self._temporary)

    def add(self, file: str, content: FileWriter) -> None:
        path = os.path.join(self._temporary, *file.split("/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        produce(path, content)
        self.manifest[file] = fingerprint(path)

    @contextlib.contextmanager
    def aside(self) -> Iterator[str]:
        """Make a folder inside the temporary one: on its disk, and removed with it if the process dies."""
        folder = os.path.join(self._temporary, ".aside")
        os.mkdir(folder)
        yield folder
        shutil.rmtree(folder)

    def commit(self) -> None:
        text = manifest_text(self.manifest)
        produce(os.path.join(self._temporary, MANIFEST), text)
        for folder, _, _ in os.walk(self._temporary):
            fsync_dir(folder)
        # The marker is written last, when the files are on disk.
        produce(os.path.join(self._temporary, COMMITTED), commit_text(text))
        fsync_dir(self._temporary)
        if os.path.lexists(self._final):
            os.rename(self._final, self._aside)
        os.rename(self._temporary, self._final)
        fsync_dir(self._root)
        shutil.rmtree(self._aside, ignore_errors=True)

    def abort(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)
        if os.path.lexists(self._aside) and not os.path.lexists(self._final):
            os.rename(self._aside, self._final)
