"""Durable directory snapshots, on a local disk or behind an fsspec URL.

Owns the layout of a checkpoint directory (docs/checkpoint-format.md) and its guarantees: a checkpoint is either
committed and complete, or invisible; a failing write leaves the earlier ones untouched; what is read was verified.
It never knows what is in the files: run/snapshot.py does. One process writes at a time.

Hashes are SHA-256: with the CPU's SHA instructions it is twice as fast as BLAKE2b. A CRC would be faster still, but
this also catches a file swapped for another.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError

from rollover.checkpoint.content import FORMAT_VERSION, FileWriter, commit_text, fingerprint
from rollover.checkpoint.entries import (
    LEFTOVER,
    UPLOAD,
    checkpoint_name,
    checkpoint_step,
    is_plain_name,
    leftover,
    name_of,
    upload_number,
)
from rollover.checkpoint.mirror import Mirror
from rollover.checkpoint.writing import COMMITTED, MANIFEST, LocalPlace, PendingCheckpoint, Place, RemotePlace

Names = list[str]  # inside CheckpointStore `list` is its method

__all__ = [
    "CheckpointStore",
    "CheckpointWriteError",
    "CorruptCheckpointError",
    "FileWriter",
    "checkpoint_name",
    "checkpoint_step",
]


class CorruptCheckpointError(ValueError):
    """A checkpoint that must not be used: not committed, or a file is missing or differs from the manifest."""


class CheckpointWriteError(OSError):
    """A checkpoint that could not be written. Earlier ones are as they were."""


class CheckpointStore:
    """The checkpoints of one run, in `dir`: a local path or an fsspec URL (file://, s3://, memory://).

    `keep` is the number of committed checkpoints that stay after a write (>= 1). Downloads of a remote store live as
    long as the store object.
    """

    def __init__(self, dir: str, keep: int) -> None:
        assert keep >= 1
        self.dir = dir
        self.keep = keep
        try:
            self._fs, self._root = url_to_fs(dir)  # a local path is absolute from here on
        except (ImportError, ValueError) as error:
            raise ValueError(f"checkpoint.dir: cannot use {dir!r}: {error}") from error
        self._local = isinstance(self._fs, LocalFileSystem)
        # torch.save and safetensors report a full disk as errors of their own; a remote store has errors of its own.
        self._errors = (OSError, RuntimeError, SafetensorError) if self._local else (Exception,)
        self._downloads: list[tempfile.TemporaryDirectory[str]] = []

    @property
    def local_folder(self) -> Path | None:
        """Of a local store."""
        return Path(self._root) if self._local else None

    def mirror(self, folder: Path) -> Mirror | None:
        """Copies of the files of a run, which lie in `folder`, beside remote checkpoints; None for a local store."""
        return None if self._local else Mirror(self._fs, f"{self._root}/run", folder, self._read_errors)

    # ---- reading

    def list(self) -> Names:
        """Names of the committed checkpoints, by step, oldest first. Changes nothing on disk."""
        with self._read_errors():
            names = {name for entry in self._entries() if (name := name_of(entry))}
            return sorted((n for n in names if self._is_committed(n)), key=checkpoint_step)

    def open(self, name: str) -> dict[str, str]:
        """Verify a checkpoint and return the local path of each of its files, by the name it was written under.

        Raises ValueError if there is no such checkpoint, and CorruptCheckpointError, which names the file and offers
        the previous committed checkpoint, if anything in it differs from what was written.
        """
        checkpoint_step(name)
        with self._read_errors():
            return self._open(name)

    def _open(self, name: str) -> dict[str, str]:
        source = self._find(name)
        if source is None:
            known = ", ".join(self.list()) or "none"
            raise ValueError(
                f"checkpoint.resume_from: there is no checkpoint {name!r} in {self.dir}. There are: {known}"
            )
        manifest = self._read_manifest(name, source)
        if self._local:
            folder = source
        else:
            download = tempfile.TemporaryDirectory(prefix="rollover-checkpoint-")
            self._downloads.append(download)
            folder = download.name
        paths = {}
        for file, entry in manifest.items():
            paths[file] = os.path.join(folder, *file.split("/"))
            if not self._local:
                os.makedirs(os.path.dirname(paths[file]), exist_ok=True)
                try:
                    self._fs.get_file(f"{source}/{file}", paths[file])
                except FileNotFoundError:
                    self._corrupt(name, file, "is missing")
            self._verify(name, file, paths[file], entry)
        return paths

    # ---- writing

    def begin(self, name: str) -> PendingCheckpoint:
        """Begin a checkpoint, whose files are added one by one and then committed; the oldest beyond `keep` go then.

        An existing checkpoint of that name is replaced. Raises CheckpointWriteError, as what it returns does, after
        removing what was written, if the disk is full or anything else in writing fails.
        """
        checkpoint_step(name)
        with self._write_errors(name, lambda: None):
            place = self._local_place(name) if self._local else self._remote_place(name)
        return PendingCheckpoint(place, lambda undo: self._write_errors(name, undo), lambda: self._prune(name))

    def write(self, name: str, files: Mapping[str, FileWriter]) -> None:
        """Begin a checkpoint, add these files and commit it."""
        pending = self.begin(name)
        for file, content in files.items():
            pending.add(file, content)
        pending.commit()

    def discard_after(self, name: str) -> None:
        """Delete the checkpoints of later steps: a run that goes on from `name` writes those steps again."""
        step = checkpoint_step(name)
        if self._local:
            self._clean_leftovers()
        for later in self.list():
            if checkpoint_step(later) > step:
                with self._read_errors():
                    self._delete(later)

    def _local_place(self, name: str) -> Place:
        os.makedirs(self._root, exist_ok=True)
        self._clean_leftovers()
        return LocalPlace(self._root, name)

    def _remote_place(self, name: str) -> Place:
        # One that is replaced is deleted after the commit of its replacement.
        replaced = self._uploads(name)
        target = self._path(f"{name}.{upload_number(replaced[-1]) + 1}" if replaced else name)
        return RemotePlace(self._fs, target, [self._path(e) for e in replaced], self._delete_upload, self._errors)

    @contextlib.contextmanager
    def _write_errors(self, name: str, undo: Callable[[], None]) -> Iterator[None]:
        """A write that fails is undone, and is an error of one line."""
        try:
            yield
        except BaseException as error:
            undo()
            if isinstance(error, self._errors):
                raise CheckpointWriteError(self._describe_failure(name, error)) from error
            raise

    def _prune(self, newest: str) -> None:
        """Delete committed checkpoints beyond `keep`, counted back from `newest`; later steps are not ours to judge."""
        step = checkpoint_step(newest)
        try:
            earlier = [n for n in self.list() if checkpoint_step(n) <= step]
        except ValueError as error:
            warnings.warn(f"no earlier checkpoint was deleted: {error}", stacklevel=2)
            return
        doomed = earlier[: -self.keep]
        if not self._local:  # an upload that was cut off has no process to clean up after it
            entries = {name for e in self._entries() if (name := name_of(e)) and checkpoint_step(name) < step}
            doomed += sorted(entries - set(earlier))
        for name in doomed:
            try:
                self._delete(name)
            except self._errors as error:
                warnings.warn(f"checkpoint {name} in {self.dir} could not be deleted: {error}", stacklevel=3)

    def _delete(self, name: str) -> None:
        path = self._path(name)
        if self._local:
            # Renamed first: a kill in the middle of the deletion must not leave a committed but incomplete checkpoint.
            doomed = self._path(leftover("tmp", name))
            os.rename(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            return
        for entry in self._uploads(name):
            self._delete_upload(self._path(entry))

    def _delete_upload(self, path: str) -> None:
        self._fs.invalidate_cache()
        if self._exists(f"{path}/{COMMITTED}"):
            self._fs.rm_file(f"{path}/{COMMITTED}")
        if self._exists(path):
            self._fs.rm(path, recursive=True)

    def _clean_leftovers(self) -> None:
        """Remove what dead writers left; a replacement that was cut off between its two renames is undone.

        One process writes at a time, so whatever is left is a dead one's, though another may live under its id now.
        """
        for entry in self._entries():
            match = LEFTOVER.fullmatch(entry)
            if match is None:
                continue
            kind, name = match[1], match[2]
            if kind == "old" and not os.path.lexists(self._path(name)):
                os.rename(self._path(entry), self._path(name))
            else:
                shutil.rmtree(self._path(entry), ignore_errors=True)

    # ---- both

    @contextlib.contextmanager
    def _read_errors(self) -> Iterator[None]:
        """A remote store that does not answer is an error of one line, and never an empty store."""
        try:
            yield
        except ValueError:
            raise
        except Exception as error:
            if self._local:
                raise
            raise ValueError(f"checkpoint.dir = {self.dir!r} cannot be read: {_in_words(error)}") from error

    def _exists(self, path: str) -> bool:
        """Not `exists` of fsspec, which takes every error for a file that is not there."""
        try:
            self._fs.info(path)
        except FileNotFoundError:
            return False
        return True

    def _path(self, entry: str) -> str:
        return f"{self._root}/{entry}"

    def _entries(self) -> Names:
        if self._local:
            return sorted(os.listdir(self._root)) if os.path.isdir(self._root) else []
        self._fs.invalidate_cache()
        try:
            return sorted(os.path.basename(p.rstrip("/")) for p in self._fs.ls(self._root, detail=False))
        except FileNotFoundError:
            return []

    def _find(self, name: str) -> str | None:
        """Where the checkpoint lies: under its name, or set aside by a writer that died before its second rename.

        In a remote store the newest upload of it that is complete, else any.
        """
        if not self._local:
            uploads = [self._path(entry) for entry in self._uploads(name)]
            committed = [path for path in uploads if self._exists(f"{path}/{COMMITTED}")]
            return next(reversed(committed or uploads), None)
        if self._exists(self._path(name)):
            return self._path(name)
        if self._local:
            for entry in self._entries():
                match = LEFTOVER.fullmatch(entry)
                if match and match[1] == "old" and match[2] == name:
                    return self._path(entry)
        return None

    def _uploads(self, name: str) -> Names:
        """The entries of a remote store that are uploads of this checkpoint, the newest last."""
        entries = [e for e in self._entries() if (match := UPLOAD.fullmatch(e)) and match[1] == name]
        return sorted(entries, key=upload_number)

    def _is_committed(self, name: str) -> bool:
        source = self._find(name)
        return source is not None and self._exists(f"{source}/{COMMITTED}")

    def _read_manifest(self, name: str, source: str) -> dict[str, dict[str, Any]]:
        """The checked entries {file: {"size", "sha256"}} of a checkpoint's manifest."""
        content = {}
        for file in (COMMITTED, MANIFEST):
            try:
                content[file] = self._fs.cat_file(f"{source}/{file}")
            except FileNotFoundError:
                self._corrupt(name, file, "is missing" + (": it was never finished" if file == COMMITTED else ""))
        if content[COMMITTED] != commit_text(content[MANIFEST]):
            self._corrupt(name, MANIFEST, f"does not match the hash in {COMMITTED}")
        manifest = json.loads(content[MANIFEST])
        if manifest["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"checkpoint {name} in {self.dir} has format {manifest['format_version']};"
                f" this version of rollover reads {FORMAT_VERSION}. Use the version of rollover that wrote it."
            )
        for file in manifest["files"]:
            if not is_plain_name(file):
                self._corrupt(name, MANIFEST, f"names a file outside the checkpoint: {file!r}")
        return manifest["files"]

    def _verify(self, name: str, file: str, path: str, entry: Mapping[str, Any]) -> None:
        if not os.path.isfile(path):
            self._corrupt(name, file, "is missing")
        found = os.path.getsize(path)
        if found != entry["size"]:
            self._corrupt(name, file, f"has {found} bytes instead of {entry['size']}")
        if fingerprint(path)["sha256"] != entry["sha256"]:
            self._corrupt(name, file, "has other content than was written (SHA-256 differs)")

    def _corrupt(self, name: str, file: str, problem: str) -> NoReturn:
        step = checkpoint_step(name)
        previous = [n for n in self.list() if checkpoint_step(n) < step]
        if previous:
            advice = (
                f"The previous committed checkpoint is {previous[-1]}:"
                f" resume from it with --checkpoint.resume_from {previous[-1]}"
            )
        else:
            advice = "There is no earlier checkpoint: start again without --resume."
        raise CorruptCheckpointError(f"checkpoint {name} in {self.dir} is corrupted: {file} {problem}. {advice}")

    def _describe_failure(self, name: str, error: Exception) -> str:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else _in_words(error)
        where = self._root if self._local else tempfile.gettempdir()
        while where and not os.path.isdir(where):
            where = os.path.dirname(where)
        free = shutil.disk_usage(where or "/").free
        return (
            f"checkpoint {name} could not be written to {self.dir}: {reason}"
            f" ({free:,} bytes free in {where or '/'}). Earlier checkpoints are untouched."
        )


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
