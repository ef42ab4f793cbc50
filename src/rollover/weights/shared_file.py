"""The file through which new weights reach an engine's process: in memory where there is room, else on a disk.

Owns the file and what lies where in it. Never reads a weight back and never talks to the process.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64
_MEMORY = "/dev/shm"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def aligned(num_bytes: int) -> int:
    """What a tensor of so many bytes takes of the file."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class SharedFile:
    """Tensors at fixed offsets, each written in place again with every version. It has no name, and vanishes with its
    last holder. `say` prints one line where memory has no room."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._folders = [*([_MEMORY] if os.path.isdir(_MEMORY) else []), tempfile.gettempdir()]  # tried in turn
        self._file: IO[bytes] | None = None
        self._reserved = 0
        self._used = 0
        self._table: dict[str, tuple[str, list[int], int]] = {}  # name -> dtype, shape, offset

    def fileno(self) -> int:
        assert self._file is not None, "nothing was written yet"
        return self._file.fileno()

    def table(self, names: Sequence[str] | None = None) -> list[list[Any]]:
        """[name, dtype, shape, offset] of these tensors (None: of all that were ever written)."""
        return [[name, *self._table[name]] for name in (self._table if names is None else names)]

    def reserve(self, num_bytes: int) -> None:
        """Take so much room now, so that no later write finds the place full. ValueError if there is none anywhere."""
        if num_bytes <= self._reserved:
            return
        if self._file is not None and _allocated(self._file, num_bytes):
            self._reserved = num_bytes
            return
        size = f"{num_bytes / 1e6:.3g} MB"
        for folder in self._folders if self._file is None else self._folders[1:]:
            file = tempfile.TemporaryFile(dir=folder)
            if not _allocated(file, num_bytes):
                file.close()
                continue
            if folder != self._folders[0]:
                self._say(
                    f"{self._folders[0]} has no room for the {size} of weights: they reach the engine process through a"
                    f" file in {folder}, which may be slower"
                )
            self._move_to(file, num_bytes)
            return
        raise ValueError(
            f"engine.kind = process needs room for {size} of weights in {' or '.join(self._folders)}, and there is"
            " none: free some, name a folder that has it in the environment variable TMPDIR, or set"
            " engine.kind = embedded"
        )

    def _move_to(self, file: IO[bytes], num_bytes: int) -> None:
        if self._file is not None:
            self._file.seek(0)
            shutil.copyfileobj(self._file, file)
            file.flush()
            self._file.close()
        self._file, self._reserved = file, num_bytes

    def write(self, name: str, tensor: torch.Tensor) -> int:
        """Copy a tensor to its place. Returns its size in bytes."""
        import torch

        flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if name not in self._table:
            end = self._used + aligned(len(flat))
            self.reserve(end)
            self._table[name] = (dtype, shape, self._used)
            self._used = end
        assert self._table[name][:2] == (dtype, shape), f"{name} has changed its shape or dtype"
        view, offset = flat.data, self._table[name][2]
        while view:
            written = os.pwrite(self.fileno(), view, offset)
            view, offset = view[written:], offset + written
        return len(flat)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _allocated(file: IO[bytes], num_bytes: int) -> bool:
    """Whether the file has room for so many bytes, which it then keeps."""
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
