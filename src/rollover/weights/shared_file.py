"""Shared file for weights of an engine in a child process: in memory if there is room, else on a disk.

Owns the file and its layout. Never communicates with the process.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from rollover.weights import NamedTensors, WeightUpdate

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_MEMORY = "/dev/shm"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SharedFile:
    """Tensors at fixed offsets of an unnamed file, overwritten with every version.

    `files`: descriptors that the child inherits under the same numbers; the message has the one with the weights.
    """

    def __init__(self) -> None:
        self._folders = [*([_MEMORY] if os.path.isdir(_MEMORY) else []), tempfile.gettempdir()]  # tried in turn
        self._places: list[tuple[str, IO[bytes]]] = []
        for folder in self._folders:
            with contextlib.suppress(OSError):  # e.g. a read-only folder
                self._places.append((folder, tempfile.TemporaryFile(dir=folder)))
        self._reserved = 0
        self._used = 0
        self._table: dict[str, tuple[str, list[int], int]] = {}  # name -> dtype, shape, offset
        self._version = 0  # of the last write

    @property
    def files(self) -> list[int]:
        return [file.fileno() for _, file in self._places]

    def reserve(self, sizes: Iterable[int]) -> None:
        """Reserve room for tensors of these bytes, so that no later `write` lacks it. Raises ValueError."""
        self._reserve(sum(map(_aligned, sizes)))

    def write(self, version: int, tensors: NamedTensors) -> WeightUpdate:
        """Write weights of `version`: all of the model's, or those that have changed.

        If memory is full, all weights move to a disk.
        """
        sizes = {name: self._write(name, tensor) for name, tensor in tensors}
        self._version = version
        return self._update(sizes, sum(sizes.values()))

    def full_update(self) -> WeightUpdate | None:
        """Return an update with all weights, for a new process; None if nothing was written."""
        return self._update(self._table, 0) if self._table else None

    @staticmethod
    def read(message: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of an update, in the child. They are views, valid until the next `write`."""
        import torch

        memory = mmap.mmap(message["file"], 0, access=mmap.ACCESS_COPY)  # unmapped with its last view
        for name, dtype, shape, offset in message["tensors"]:
            count = math.prod(shape)
            yield name, torch.frombuffer(memory, dtype=getattr(torch, dtype), count=count, offset=offset).view(shape)

    def close(self) -> None:
        for _, file in self._places:
            file.close()

    def _update(self, names: Iterable[str], num_bytes: int) -> WeightUpdate:
        tensors = [[name, *self._table[name]] for name in names]
        message = {"version": self._version, "file": self.files[0], "tensors": tensors}
        return WeightUpdate(self._version, num_bytes, message)

    def _reserve(self, num_bytes: int) -> None:
        """Reserve this much room in total, in the first folder that has it; written weights move there."""
        if num_bytes <= self._reserved:
            return
        size = f"{num_bytes / 1e6:.3g} MB"
        for index, (folder, file) in enumerate(self._places):
            if not _allocated(file, num_bytes):
                continue
            if folder != self._folders[0] and (index or not self._reserved):
                logger.warning(
                    f"{self._folders[0]} has no room for the {size} of weights: they reach the engine process through a"
                    f" file in {folder}, which may be slower"
                )
            for _, full in self._places[:index]:
                full.seek(0)
                shutil.copyfileobj(full, file)
                full.truncate(0)  # the child has it open, too
                full.close()
            file.flush()
            del self._places[:index]
            self._reserved = num_bytes
            return
        raise ValueError(
            f"engine.kind = process needs room for {size} of weights in {' or '.join(self._folders)}, and there is"
            " none: free some, name a folder that has it in the environment variable TMPDIR, or set"
            " engine.kind = embedded"
        )

    def _write(self, name: str, tensor: torch.Tensor) -> int:
        """Write a tensor at its offset. Returns its size in bytes."""
        import torch

        flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if name not in self._table:
            end = self._used + _aligned(len(flat))
            self._reserve(end)
            self._table[name] = (dtype, shape, self._used)
            self._used = end
        assert self._table[name][:2] == (dtype, shape), f"{name} has changed its shape or dtype"
        view, offset = flat.data, self._table[name][2]
        while view:
            written = os.pwrite(self.files[0], view, offset)
            view, offset = view[written:], offset + written
        return len(flat)


def _aligned(num_bytes: int) -> int:
    """Return the bytes of a tensor in the file, with alignment."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _allocated(file: IO[bytes], num_bytes: int) -> bool:
    """Allocate these bytes for the file. Returns False if there is no room."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:
            os.ftruncate(file.fileno(), num_bytes)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        return False
    return True
