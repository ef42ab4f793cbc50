"""Where checkpoints are: names of entries, files with their manifest, and the two storages.

    CheckpointStore (store.py) ──▶ Storage.begin ──▶ CheckpointWriter: add, add_folder, ... ──▶ commit or abort

LocalStorage: a folder beside the final one, renamed into place when it is complete. RemoteStorage: behind an fsspec
URL, in a store without rename; a marker, uploaded last, makes a checkpoint valid. Owns the order of changes, which
survives the death of the process at any moment (docs/checkpoint-format.md). One process writes at a time. Knows nothing
of the content of the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rollover.files import fsync_dir, give_usual_mode, open_regular

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


class LocalStorage(Storage):
    """A local folder."""

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


class RemoteStorage(Storage):
    """A store behind an fsspec URL. Downloads live as long as this object.

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


def existing(folder: str) -> str:
    """Return the folder, or its nearest existing parent."""
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder or "/"
