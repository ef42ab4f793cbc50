"""A checkpoint between begin and commit: its files one by one, in a local directory or a remote store.

Owns the order of the changes on disk (docs/checkpoint-format.md): whatever moment the process dies at, what is
committed is complete and what is not is invisible. Never decides what is in a file, nor what is deleted later.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rollover.checkpoint.content import FileWriter, commit_text, fingerprint, manifest_text, produce
from rollover.checkpoint.entries import is_plain_name, leftover
from rollover.files import fsync_dir

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"


class Place(ABC):
    """Where the files of one checkpoint go. `manifest`: what was written so far."""

    def __init__(self) -> None:
        self.manifest: dict[str, dict[str, Any]] = {}

    @abstractmethod
    def add(self, file: str, content: FileWriter) -> None: ...

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abort(self) -> None:
        """Leave everything as it was before."""


class LocalPlace(Place):
    """A folder beside the final one, which is renamed when it is complete."""

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

    def commit(self) -> None:
        text = manifest_text(self.manifest)
        produce(os.path.join(self._temporary, MANIFEST), text)
        for folder, _, _ in os.walk(self._temporary):
            fsync_dir(folder)
        # The marker vouches for the files, so it is created only when they are on disk.
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


class RemotePlace(Place):
    """A folder `target` of an object store, which has no rename: the marker comes last, and readers go by it alone.

    `replaced`: earlier uploads of this checkpoint; `delete` removes one of them, or what was uploaded of this.
    `errors`: what a failing store raises. Files are staged one at a time: the local disk holds only the largest.
    """

    def __init__(
        self,
        fs: Any,
        target: str,
        replaced: list[str],
        delete: Callable[[str], None],
        errors: tuple[type[Exception], ...],
    ) -> None:
        super().__init__()
        self._fs, self._target, self._replaced, self._delete, self._errors = fs, target, replaced, delete, errors

    def add(self, file: str, content: FileWriter) -> None:
        with tempfile.TemporaryDirectory(prefix="rollover-checkpoint-") as staging:
            staged = os.path.join(staging, "file")
            produce(staged, content)
            self.manifest[file] = fingerprint(staged)
            self._fs.makedirs(os.path.dirname(f"{self._target}/{file}"), exist_ok=True)
            self._fs.put_file(staged, f"{self._target}/{file}")

    def commit(self) -> None:
        text = manifest_text(self.manifest)
        self._fs.makedirs(self._target, exist_ok=True)
        self._fs.pipe_file(f"{self._target}/{MANIFEST}", text)
        self._fs.pipe_file(f"{self._target}/{COMMITTED}", commit_text(text))
        for entry in self._replaced:
            try:
                self._delete(entry)
            except self._errors as error:
                warnings.warn(f"{entry}, which was replaced, could not be deleted: {error}", stacklevel=4)

    def abort(self) -> None:
        with contextlib.suppress(*self._errors):
            self._delete(self._target)


class PendingCheckpoint:
    """What `CheckpointStore.begin` gives: `add` the files, then `commit`.

    Until it is committed, earlier checkpoints, one of the same name included, are what readers see. An error ends it:
    what was written is removed. `guard(undo)` says an error of the disk in words; `on_commit` is called after it.
    """

    def __init__(
        self,
        place: Place,
        guard: Callable[[Callable[[], None]], AbstractContextManager[None]],
        on_commit: Callable[[], None],
    ) -> None:
        self._place, self._guard, self._on_commit = place, guard, on_commit

    def add(self, file: str, content: FileWriter) -> None:
        """Write one file durably: its bytes, or a function that writes it at the local path it is given.

        `file`: its name, relative; `/` separates folders.
        """
        assert is_plain_name(file) and file not in (MANIFEST, COMMITTED), f"bad file name: {file!r}"
        with self._guard(self._place.abort):
            self._place.add(file, content)

    def commit(self) -> None:
        """From now on readers see it."""
        with self._guard(self._place.abort):
            self._place.commit()
        self._on_commit()
