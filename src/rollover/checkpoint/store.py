"""The checkpoints of one run: durable snapshots of a directory, in a local folder or behind an fsspec URL.

Owns the list of checkpoints, the deletion of old ones, and guarantees (docs/checkpoint-format.md): a checkpoint is
either committed and complete, or invisible; a failing write leaves the earlier ones untouched; every file that is read
is verified. run/checkpointing.py knows the content of the files. One process writes at a time.

Hashes are SHA-256: with the CPU's SHA instructions it is twice as fast as BLAKE2b. A CRC would be faster still, but
this also catches a file swapped for another.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from rollover.checkpoint.mirror import Mirror
from rollover.checkpoint.storage import (
    COMMITTED,
    FORMAT_VERSION,
    MANIFEST,
    CheckpointWriter,
    FileWriter,
    FolderWriter,
    LocalStorage,
    RemoteStorage,
    Storage,
    checkpoint_step,
    commit_text,
    existing,
    fingerprint,
    is_plain_name,
)

Names = list[str]  # inside CheckpointStore `list` is its method


class CorruptCheckpointError(ValueError):
    """A checkpoint that is not committed, or has a file that is missing or differs from the manifest."""


class CheckpointWriteError(OSError):
    """A checkpoint that could not be written. Earlier ones are untouched."""


class CheckpointStore:
    """The checkpoints of one run, in `dir`: a local path or an fsspec URL (file://, s3://, memory://).

    `keep`: number of committed checkpoints that stay after a write (>= 1), beside the one of `protect`. Downloads of a
    remote store live as long as this object. `shared`: a local folder that all machines of the run see, for temporary
    files of a remote store; None: TMPDIR.
    """

    def __init__(self, dir: str, keep: int, shared: Path | None = None) -> None:
        assert keep >= 1
        self.dir = dir
        self.keep = keep
        self._kept = ""
        self._storage = _storage(dir, shared)

    @property
    def local_folder(self) -> Path | None:
        """The folder of a local store; None for a remote one."""
        return self._storage.local_folder

    def mirror(self, folder: Path) -> Mirror | None:
        """Return a Mirror of the run's files in `folder`, beside remote checkpoints; None for a local store."""
        storage = self._storage
        if storage.local_folder is not None:
            return None
        return Mirror(storage.fs, storage.at("run"), folder, storage.reading)

    # Reading

    def list(self) -> Names:
        """Return the names of the committed checkpoints, oldest first. Changes nothing on disk."""
        with self._storage.reading():
            return sorted(filter(self._is_committed, self._storage.names()), key=checkpoint_step)

    def open(self, name: str) -> dict[str, str]:
        """Verify a checkpoint and return the local path of each of its files, by name.

        ValueError if there is no such checkpoint. CorruptCheckpointError if anything differs from what was written: it
        names the file and the previous committed checkpoint.
        """
        step = checkpoint_step(name)
        with self._storage.reading():
            source = self._storage.find(name)
            if source is None:
                known = ", ".join(self.list()) or "none"
                raise ValueError(
                    f"checkpoint.resume_from: there is no checkpoint {name!r} in {self.dir}. There are: {known}"
                )
            try:
                return read_checkpoint(self._storage, name, source)
            except Damaged as damage:
                previous = [n for n in self.list() if checkpoint_step(n) < step]
                raise CorruptCheckpointError(
                    f"checkpoint {name} in {self.dir} is corrupted: {damage}. {_advice(previous)}"
                ) from None

    def _is_committed(self, name: str) -> bool:
        source = self._storage.find(name)
        return source is not None and self._storage.exists(f"{source}/{COMMITTED}")

    # Writing

    def write(
        self, name: str, files: Mapping[str, FileWriter], folders: Sequence[tuple[str, FolderWriter]] = ()
    ) -> None:
        """Write a checkpoint of `files` and `folders` (CheckpointWriter.add_folder), commit it, and delete old ones.

        A file is its bytes, or a function that writes it to a local path. Readers see the earlier checkpoints, also one
        of the same name, which is replaced, until the commit. CheckpointWriteError, after removing what was written, if
        the disk is full or writing fails otherwise; other errors of `folders` are raised as they are.
        """
        checkpoint_step(name)
        for file in files:
            assert is_plain_name(file) and file not in (MANIFEST, COMMITTED), f"bad file name: {file!r}"
        writer: CheckpointWriter | None = None
        try:
            writer = self._storage.begin(name)
            for file, content in files.items():
                writer.add(file, content)
            for prefix, write in folders:
                writer.add_folder(prefix, write)
            writer.commit()
        except BaseException as error:
            if writer is not None:
                writer.abort()
                if error is writer.not_of_disk:
                    raise
            if isinstance(error, self._storage.write_errors):
                raise CheckpointWriteError(self._describe_failure(name, error)) from error
            raise
        self._prune(name)

    def discard_after(self, name: str) -> None:
        """Delete the checkpoints of later steps: a run that resumes from `name` writes them again."""
        step = checkpoint_step(name)
        self._storage.clean()
        for later in self.list():
            if checkpoint_step(later) > step:
                with self._storage.reading():
                    self._storage.delete(later)

    def protect(self, name: str) -> None:
        """Keep this checkpoint in place of the one protected before, which is deleted if it is old.

        It need not exist.
        """
        if name == self._kept:
            return
        self._kept = name
        if names := self.list():
            self._prune(names[-1])

    def _prune(self, newest: str) -> None:
        """Delete committed checkpoints beyond `keep`, counted back from `newest`. Later steps stay."""
        step = checkpoint_step(newest)
        try:
            earlier = [n for n in self.list() if checkpoint_step(n) <= step]
        except ValueError as error:
            warnings.warn(f"no earlier checkpoint was deleted: {error}", stacklevel=2)
            return
        never_finished = {n for n in self._storage.unclean() if checkpoint_step(n) < step} - set(earlier)
        too_old = [n for n in earlier[: -self.keep] if n != self._kept]
        for name in [*too_old, *sorted(never_finished)]:
            try:
                self._storage.delete(name)
            except self._storage.write_errors as error:
                warnings.warn(f"checkpoint {name} in {self.dir} could not be deleted: {error}", stacklevel=3)

    def _describe_failure(self, name: str, error: Exception) -> str:
        if isinstance(error, OSError) and error.errno:
            reason = error.strerror or os.strerror(error.errno)
        else:
            reason = f"{type(error).__name__}: {error}"
        where = existing(self._storage.needs_room_in)
        return (
            f"checkpoint {name} could not be written to {self.dir}: {reason}"
            f" ({shutil.disk_usage(where).free:,} bytes free in {where}). Earlier checkpoints are untouched."
        )


def _storage(dir: str, shared: Path | None) -> Storage:
    try:
        fs, root = url_to_fs(dir)  # a local path is absolute from here on
    except (ImportError, ValueError) as error:
        raise ValueError(f"checkpoint.dir: cannot use {dir!r}: {error}") from error
    return LocalStorage(fs, root, dir) if isinstance(fs, LocalFileSystem) else RemoteStorage(fs, root, dir, shared)


def _advice(previous: Names) -> str:
    if not previous:
        return "There is no earlier checkpoint: start again without --resume."
    return (
        f"The previous committed checkpoint is {previous[-1]}: resume from it with --checkpoint.resume_from"
        f" {previous[-1]}"
    )


class Damaged(Exception):
    """A damaged checkpoint. `problem` follows the name of the `file`: "is missing"."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file} {problem}")
        self.file, self.problem = file, problem


def read_checkpoint(storage: Storage, name: str, source: str) -> dict[str, str]:
    """Return the local path of each file of checkpoint `name` at `source`, by its name.

    Damaged if anything differs from what was written, ValueError for another version of the format.
    """
    manifest = _manifest(storage, name, source)
    folder = storage.folder_for(source)
    paths = {}
    for file, entry in manifest.items():
        paths[file] = os.path.join(folder, *file.split("/"))
        try:
            storage.fetch(source, file, paths[file])
        except FileNotFoundError:
            raise Damaged(file, "is missing") from None
        _verify(file, paths[file], entry)
    return paths


def _manifest(storage: Storage, name: str, source: str) -> dict[str, dict[str, Any]]:
    """Return the checked entries {file: {"size", "sha256"}} of a checkpoint's manifest."""
    content = {}
    for file in (COMMITTED, MANIFEST):
        try:
            content[file] = storage.read(f"{source}/{file}")
        except FileNotFoundError:
            end = ": it was never finished" if file == COMMITTED else ""
            raise Damaged(file, f"is missing{end}") from None
    if content[COMMITTED] != commit_text(content[MANIFEST]):
        raise Damaged(MANIFEST, f"does not match the hash in {COMMITTED}")
    manifest = json.loads(content[MANIFEST])
    if manifest["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint {name} in {storage.dir} has format {manifest['format_version']};"
            f" this version of rollover reads {FORMAT_VERSION}. Use the version of rollover that wrote it."
        )
    for file in manifest["files"]:
        if not is_plain_name(file):
            raise Damaged(MANIFEST, f"names a file outside the checkpoint: {file!r}")
    return manifest["files"]


def _verify(file: str, path: str, entry: Mapping[str, Any]) -> None:
    if not os.path.isfile(path):
        raise Damaged(file, "is missing")
    found = os.path.getsize(path)
    if found != entry["size"]:
        raise Damaged(file, f"has {found} bytes instead of {entry['size']}")
    if fingerprint(path)["sha256"] != entry["sha256"]:
        raise Damaged(file, "has other content than was written (SHA-256 differs)")
