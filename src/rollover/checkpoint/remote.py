"""Checkpoints behind an fsspec URL, in a store without rename: a marker, uploaded last, makes a checkpoint valid.

Owns the order of uploads and deletions, and the downloads.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rollover.checkpoint.storage import (
    COMMITTED,
    MANIFEST,
    UPLOAD,
    CheckpointWriter,
    FileWriter,
    Storage,
    commit_text,
    fingerprint,
    manifest_text,
    produce,
    upload_number,
)


class RemoteStorage(Storage):
    """See Storage. Downloads live as long as this object.

    `shared`: a local folder that all machines of the run see, for temporary files; None: TMPDIR.
    """

    write_errors = (Exception,)  # every store has errors of its own

    def __init__(self, fs: Any, root: str, dir: str, shared: Path | None) -> None:
        super().__init__(fs, root, dir)
        self._shared = shared
        self._downloads: list[tempfile.TemporaryDirectory[str]] = []

    @property
    def local_folder(self) -> None:
        return None

    @property
    def needs_room_in(self) -> str:
        return str(self._shared or tempfile.gettempdir())

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Turn errors into a ValueError: a store that does not answer must not look empty."""
        try:
            yield
        except ValueError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"checkpoint.dir = {self.dir!r} cannot be read: {reason}") from error

    def entries(self) -> list[str]:
        self.fs.invalidate_cache()
        try:
            return sorted(os.path.basename(p.rstrip("/")) for p in self.fs.ls(self.root, detail=False))
        except FileNotFoundError:
            return []

    def unclean(self) -> set[str]:
        """Return all: `clean` removes nothing here."""
        return self.names()

    def find(self, name: str) -> str | None:
        """Return the newest complete upload, or else the newest."""
        uploads = [self.at(entry) for entry in self._uploads(name)]
        committed = [path for path in uploads if self.exists(f"{path}/{COMMITTED}")]
        return next(reversed(committed or uploads), None)

    def folder_for(self, source: str) -> str:
        download = _temporary(self._shared)
        self._downloads.append(download)
        return download.name

    def fetch(self, source: str, file: str, path: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.fs.get_file(f"{source}/{file}", path)

    def begin(self, name: str) -> CheckpointWriter:
        # A replaced upload is deleted after the commit of its replacement.
        replaced = self._uploads(name)
        target = self.at(f"{name}.{upload_number(replaced[-1]) + 1}" if replaced else name)
        earlier = [self.at(entry) for entry in replaced]
        return RemoteWriter(self.fs, target, earlier, self._delete_upload, self.write_errors, self._shared)

    def delete(self, name: str) -> None:
        for entry in self._uploads(name):
            self._delete_upload(self.at(entry))

    def clean(self) -> None:
        """Do nothing: incomplete uploads are invisible, and deleted with old checkpoints."""

    def _uploads(self, name: str) -> list[str]:
        """Return the uploads of this checkpoint, the newest last."""
        entries = [e for e in self.entries() if (match := UPLOAD.fullmatch(e)) and match[1] == name]
        return sorted(entries, key=upload_number)

    def _delete_upload(self, path: str) -> None:
        self.fs.invalidate_cache()
        if self.exists(f"{path}/{COMMITTED}"):
            self.fs.rm_file(f"{path}/{COMMITTED}")
        if self.exists(path):
            self.fs.rm(path, recursive=True)


class RemoteWriter(CheckpointWriter):
    """Writes to the folder `target` of an object store, the marker last.

    `replaced`: earlier uploads of this checkpoint; `delete` removes one of them, or this one. `errors`: those of a
    failing store; `shared`: see RemoteStorage. Files are staged locally one at a time.
    """

    def __init__(
        self,
        fs: Any,
        target: str,
        replaced: list[str],
        delete: Callable[[str], None],
        errors: tuple[type[Exception], ...],
        shared: Path | None,
    ) -> None:
        super().__init__()
        self._fs, self._target, self._replaced, self._delete, self._errors = fs, target, replaced, delete, errors
        self._shared = shared

    def add(self, file: str, content: FileWriter) -> None:
        with _temporary(self._shared) as staging:
            staged = os.path.join(staging, "file")
            produce(staged, content)
            self.manifest[file] = fingerprint(staged)
            self._fs.makedirs(os.path.dirname(f"{self._target}/{file}"), exist_ok=True)
            self._fs.put_file(staged, f"{self._target}/{file}")

    def aside(self) -> AbstractContextManager[str]:
        return _temporary(self._shared)

    def commit(self) -> None:
        text = manifest_text(self.manifest)
        self._fs.makedirs(self._target, exist_ok=True)
        self._fs.pipe_file(f"{self._target}/{MANIFEST}", text)
        self._fs.pipe_file(f"{self._target}/{COMMITTED}", commit_text(text))
        for entry in self._replaced:
            try:
                self._delete(entry)
            except self._errors as error:
                warnings.warn(f"{entry}, which was replaced, could not be deleted: {error}", stacklevel=3)

    def abort(self) -> None:
        with contextlib.suppress(*self._errors):
            self._delete(self._target)


def _temporary(shared: Path | None) -> tempfile.TemporaryDirectory[str]:
    if shared is not None:
        shared.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="rollover-checkpoint-", dir=shared)
