"""Storage of checkpoints: names of entries, files with their manifest, and the interface of a local or remote store.

    CheckpointStore (store.py) ──▶ Storage.begin ──▶ CheckpointWriter: add, add_folder, ... ──▶ commit or abort
                                   LocalStorage (local.py), RemoteStorage (remote.py)

The writers store files in an order that survives the death of the process at any moment (docs/checkpoint-format.md).
Knows nothing of the content of the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rollover.files import give_usual_mode, open_regular

_NAME = re.compile(r"step-(\d+)")
# In a remote store: step-N is the first upload of a checkpoint, step-N.1, .2, ... replace it.
UPLOAD = re.compile(r"(step-\d+)(?:\.(\d+))?")
# .tmp-<name>-<pid>: being written or deleted. .old-<name>-<pid>: the old one, while its replacement is renamed.
LEFTOVER = re.compile(r"\.(tmp|old)-(step-\d+)-(\d+)")


def checkpoint_name(step: int) -> str:
    """Return `step-000020` for 20."""
    return f"step-{step:06d}"


def checkpoint_step(name: str) -> int:
    """Return the step in a checkpoint's name. ValueError for anything else."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"checkpoint.resume_from: {name!r} is not the name of a checkpoint, such as step-000020")
    return int(match[1])


def name_of(entry: str) -> str | None:
    """Return the checkpoint name of a directory entry, also of a .old- one; None for others."""
    if match := UPLOAD.fullmatch(entry):
        return match[1]
    match = LEFTOVER.fullmatch(entry)
    return match[2] if match and match[1] == "old" else None


def upload_number(upload: str) -> int:
    """Return the index of an upload among those of its checkpoint: 0, 1, 2, ..."""
    return int(upload.partition(".")[2] or 0)


def leftover(kind: str, name: str) -> str:
    return f".{kind}-{name}-{os.getpid()}"


def is_plain_name(file: str) -> bool:
    parts = file.split("/")
    return "\\" not in file and all(part not in ("", ".", "..") for part in parts)


FORMAT_VERSION = 1
_CHUNK_BYTES = 1 << 22

FileWriter = Callable[[str], None] | bytes
FolderWriter = Callable[[str], None]
"""Writes files into an empty folder, perhaps from several processes. OSError for an error of the disk."""


def produce(path: str, content: FileWriter) -> None:
    """Write one file and make it durable."""
    if isinstance(content, bytes):
        Path(path).write_bytes(content)
    else:
        content(path)
        give_usual_mode(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fingerprint(path: str) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        return {"size": file.tell(), "sha256": digest.hexdigest()}


def manifest_text(files: Mapping[str, Mapping[str, Any]]) -> bytes:
    return json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1, sort_keys=True).encode() + b"\n"


def commit_text(manifest: bytes) -> bytes:
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"


class CheckpointWriter(ABC):
    """Writer of one checkpoint. It is invisible until `commit`, and then complete."""

    def __init__(self) -> None:
        self.manifest: dict[str, dict[str, Any]] = {}
        """Size and hash of the files so far."""
        self.not_of_disk: BaseException | None = None
        """An error of a FolderWriter other than OSError: the death of a process must not look like a full disk."""

    @abstractmethod
    def add(self, file: str, content: FileWriter) -> None:
        """Write one file durably. `file`: its relative path, with `/`."""

    def add_folder(self, prefix: str, write: FolderWriter) -> None:
        """Add all files that `write` leaves in a folder, each as `prefix` and its path there.

        They are moved, not copied, if checkpoints are on the same file system.
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
        """Make a temporary folder for files to add, which all machines of the run see."""

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abort(self) -> None:
        """Undo all writes."""


def _mover(source: Path) -> FileWriter:
    def move(path: str) -> None:
        shutil.move(source, path)

    return move


class Storage(ABC):
    """Checkpoints below `root` of the fsspec file system `fs`; `dir`: the value of checkpoint.dir."""

    write_errors: tuple[type[Exception], ...]
    """Errors of a write that are due to the disk or the store."""

    def __init__(self, fs: Any, root: str, dir: str) -> None:
        self.fs, self.root, self.dir = fs, root, dir

    @property
    @abstractmethod
    def local_folder(self) -> Path | None:
        """The folder, if it is on this machine."""

    @property
    @abstractmethod
    def needs_room_in(self) -> str:
        """The local folder to which a checkpoint is written first."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[None]:
        """Turn errors of the block, in reading or deleting, into a ValueError of one line."""

    @abstractmethod
    def entries(self) -> list[str]:
        """Return the names in `root`, sorted; [] if it does not exist."""

    def names(self) -> set[str]:
        """Return the names of all checkpoints, committed or not."""
        return {name for entry in self.entries() if (name := name_of(entry))}

    @abstractmethod
    def unclean(self) -> set[str]:
        """Return those of `names` that `clean` does not remove if their writer died."""

    @abstractmethod
    def find(self, name: str) -> str | None:
        """Return the path of a checkpoint, committed or not; None if there is none."""

    def exists(self, path: str) -> bool:
        """Return whether there is such a file. Errors are raised, other than by fsspec's `exists`."""
        try:
            self.fs.info(path)
        except FileNotFoundError:
            return False
        return True

    def read(self, path: str) -> bytes:
        """Read a file. FileNotFoundError if it is missing; ValueError for a local folder, device or pipe."""
        if self.local_folder is not None:
            with open_regular(path) as file:
                return file.read()
        return self.fs.cat_file(path)

    @abstractmethod
    def folder_for(self, source: str) -> str:
        """Return the local folder for the files of the checkpoint at `source`, into which `fetch` brings them."""

    @abstractmethod
    def fetch(self, source: str, file: str, path: str) -> None:
        """Bring one file of a checkpoint to its local path. FileNotFoundError if it is missing."""

    @abstractmethod
    def begin(self, name: str) -> CheckpointWriter:
        """Begin a new checkpoint."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a checkpoint. A kill meanwhile leaves no checkpoint that looks committed."""

    @abstractmethod
    def clean(self) -> None:
        """Remove leftovers of dead writers. No other process may be writing."""

    def at(self, entry: str) -> str:
        return f"{self.root}/{entry}"


def existing(folder: str) -> str:
    """Return the folder, or its nearest existing parent."""
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder or "/"
