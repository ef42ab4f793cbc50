"""Whole weights in a safetensors file with a path and a SHA-256, for servers.

    <folder>/rollover-weights-<random>/<version>.<n>.safetensors   written aside and renamed; the last two are kept
                                       lock                        held while the owner lives

If the owner is killed, a child process removes the folder (remover.py); if that was killed too, the next owner with the
same parent folder does. Each file has all weights, unchanged ones copied from the last file: a server that gets a part
of a model reports success, and samples garbage. Weights that are in a file already, as from ranks, are hard-linked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from rollover.files import local_path
from rollover.weights import NamedTensors, WeightUpdate, remover
from rollover.weights.safetensors_stream import WholeFile, mapped

logger = logging.getLogger(__name__)

KEPT = 2
_MEMORY = "/dev/shm"
_PREFIX = "rollover-weights-"
_LOCK = "lock"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LockedFolder:
    """A locked temporary folder in the folder `wanted`; if that is "", in memory if there is room, else on a disk."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted and str(local_path(wanted))
        self._path: Path | None = None
        self._lock: IO[bytes] | None = None
        self._remover: subprocess.Popen[bytes] | None = None

    def path(self, num_bytes: int) -> Path:
        """Return the folder's path. The first call creates it, with room for `num_bytes` if possible."""
        if self._path is None:
            parent = self._wanted or self._choose_parent(num_bytes)
            os.makedirs(parent, exist_ok=True)
            _remove_orphans(parent)
            self._path, self._lock = _create(parent)
            self._remover = subprocess.Popen(
                [sys.executable, "-I", "-S", remover.__file__, self._path, _LOCK],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # signals to this process's group must not end it
            )
        return self._path

    def close(self) -> None:
        """Remove the folder."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
        if self._remover is not None:
            self._remover.kill()
            self._remover.wait()
        self._path = self._lock = self._remover = None

    def _choose_parent(self, num_bytes: int) -> str:
        fallback = tempfile.gettempdir()
        if os.path.isdir(_MEMORY):
            if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= num_bytes:
                return _MEMORY
            logger.warning(
                f"{_MEMORY} has no room for {num_bytes / 1e6:.3g} MB, all copies of the weights: they go through files"
                f" in {fallback}, which may be slower"
            )
        return fallback


def no_room_error(folder: Path, why: object) -> ValueError:
    """Return the error for a folder without room for the weights."""
    return ValueError(
        f"the weights could not be written to {folder} ({why}): free some room there, or name another folder in"
        " engine.weights_dir"
    )


class WeightsFile:
    """Whole weights in `folder`; if that is "", in memory if there is room, else on a disk.

    The message of an update has the file's `path` and `sha256`.
    """

    def __init__(self, folder: str = "") -> None:
        self._folder = LockedFolder(folder)
        self._num_sent = 0
        self._last: WeightUpdate | None = None
        self._files: list[Path] = []

    def write(self, version: int, tensors: NamedTensors) -> WeightUpdate:
        """Write weights of `version`: all, or those that have changed. Raises ValueError without room."""
        from safetensors.torch import save_file

        folder = self._folder.path(0)
        new = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors}
        self._num_sent += 1
        path = folder / f"{version}.{self._num_sent}.safetensors"
        aside = path.with_suffix(".part")
        try:
            if not (isinstance(tensors, WholeFile) and _linked(tensors.path, aside)):
                rest = {} if self._last is None else dict(mapped(self._last.message["path"], without=new))
                save_file(rest | new, aside)
            with open(aside, "rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
        except Exception as error:  # safetensors has its own errors for a full disk
            aside.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno not in _NO_ROOM:
                raise
            raise no_room_error(folder, error) from error
        aside.rename(path)
        self._files.append(path)
        for old in self._files[:-KEPT]:
            old.unlink(missing_ok=True)
        self._files = self._files[-KEPT:]
        message = {"version": version, "path": str(path), "sha256": digest}
        self._last = WeightUpdate(version, 0, message)
        return WeightUpdate(version, sum(tensor.nbytes for tensor in new.values()), message)

    def full_update(self) -> WeightUpdate | None:
        """Return an update with all weights, for a new server; None if nothing was written."""
        return self._last

    def close(self) -> None:
        """Remove the folder."""
        self._folder.close()


def _linked(path: Path, link: Path) -> bool:
    """Create a hard link. Returns False if the file system does not support it, or is another one."""
    try:
        os.link(path, link)
    except OSError:
        return False
    return True


def _create(parent: str) -> tuple[Path, IO[bytes]]:
    """Create a folder, and lock it. Retries if another owner removed it before it was locked."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)).absolute()
        lock = open(path / _LOCK, "wb")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / _LOCK).exists():
            return path, lock
        lock.close()


def _remove_orphans(parent: str) -> None:
    """Remove folders whose owner has ended: their lock is free."""
    for folder in Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), open(folder / _LOCK, "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
