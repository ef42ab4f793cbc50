"""Where the checkpoints of one run lie: what differs between a local folder (local.py) and a remote store (remote.py).

Knows the names of checkpoints and never their content.
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
# Of one step, in a remote store: the first upload, and .1, .2, ... of each that replaces it.
UPLOAD = re.compile(r"(step-\d+)(?:\.(\d+))?")
# .tmp-<name>-<pid>: being written or deleted. .old-<name>-<pid>: set aside while its replacement is renamed in.
LEFTOVER = re.compile(r"\.(tmp|old)-(step-\d+)-(\d+)")


def checkpoint_name(step: int) -> str:
    """`step-000020` for 20."""
    return f"step-{step:06d}"


def checkpoint_step(name: str) -> int:
    """The step in a checkpoint's name. Raises ValueError for anything else."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"checkpoint.resume_from: {name!r} is not the name of a checkpoint, such as step-000020")
    return int(match[1])


def name_of(entry: str) -> str | None:
    """The checkpoint that a directory entry holds: its own name, or the name it was set aside from."""
    if match := UPLOAD.fullmatch(entry):
        return match[1]
    match = LEFTOVER.fullmatch(entry)
    return match[2] if match and match[1] == "old" else None


def upload_number(upload: str) -> int:
    """Which of the uploads of one checkpoint it is, in order: 0, 1, 2, ..."""
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
"""Writes files into the folder that it is given, which is empty; several processes may do so together. OSError where a
disk is at fault."""


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
