"""Whole weights in a safetensors file with a name and a checksum: for engines that this process has no pipe to.

    <folder>/rollover-weights-<random>/<version>.<n>.safetensors   written aside and renamed; the last two are kept
                                       lock                        held while its owner lives

Owns the folder. Where its owner is killed, a process that waits for that removes it (remover.py); where that was
killed too, the next owner that writes beside it does. The file has all weights every time, those that a send did not
bring taken from the last one: a server that is given a part of a model answers that all is well, and samples garbage.
Where they come in a file already, as from ranks, that gets a second name, and is not written again.
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
from rollover.weights import remover
from rollover.weights.protocol import NamedTensors, WeightUpdate
from rollover.weights.safetensors_stream import WholeFile, mapped

logger = logging.getLogger(__name__)

KEPT = 2
_MEMORY = "/dev/shm"
_PREFIX = "rollover-weights-"
_LOCK = "lock"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LockedFolder:
    """A folder of one owner, in the folder `wanted`; without one, in memory where there is room, else on a disk."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted and str(local_path(wanted))
        self._path: Path | None = None
        self._lock: IO[bytes] | None = None
        self._remover: subprocess.Popen[bytes] | None = None

    def path(self, num_bytes: int) -> Path:
        """Where it is: made at the first call, for so many bytes."""
        if self._path is None:
            parent = self._wanted or self._chosen(num_bytes)
            os.makedirs(parent, exist_ok=True)
            _remove_what_is_left(parent)
            self._path, self._lock = _made(parent)
            self._remover = subprocess.Popen(
                [sys.executable, "-I", "-S", remover.__file__, self._path, _LOCK],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # what ends this process's group must not end it
            )
        return self._path

    def close(self) -> None:
        """Remove it."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
        if self._remover is not None:
            self._remover.kill()
            self._remover.wait()
        self._path = self._lock = self._remover = None

    def _chosen(self, num_bytes: int) -> str:
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
    """What to raise where a folder has no room for the weights."""
    return ValueError(
        f"the weights could not be written to {folder} ({why}): free some room there, or name another folder in"
        " engine.weights_dir"
    )


class WeightsFile:
    """Whole weights in `folder`; without one, in memory where there is room, else on a disk.

    The message has the file's `path` and `sha256`.
    """

    def __init__(self, folder: str = "") -> None:
        self._folder = LockedFolder(folder)
        self._num_sent = 0
        self._last: WeightUpdate | None = None
        self._files: list[Path] = []

    def write(self, version: int, tensors: NamedTensors) -> WeightUpdate:
        """Hand over weights of `version`: all of the model's, or those that have changed. ValueError without room."""
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
        except Exception as error:  # safetensors has errors of its own for a full disk
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
        """All that was ever sent, for a server that begins anew; None: nothing was."""
        return self._last

    def close(self) -> None:
        """Remove the folder."""
        self._folder.close()


def _linked(path: Path, link: Path) -> bool:
    """Whether the file has this second name now: not on every disk, and never on another one."""
    try:
        os.link(path, link)
    except OSError:
        return False
    return True


def _made(parent: str) -> tuple[Path, IO[bytes]]:
    """A new folder, and its lock, which is held. Another owner that begins at this moment may find the folder before it
    is locked, and remove it: then it is made anew."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)).absolute()
        lock = open(path / _LOCK, "wb")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / _LOCK).exists():
            return path, lock
        lock.close()


def _remove_what_is_left(parent: str) -> None:
    """Folders of owners that live no more: nobody holds their lock."""
    for folder in Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), open(folder / _LOCK, "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
