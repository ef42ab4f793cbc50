"""Verification of a weights file named by a client of a server: its SHA-256, and the tensors in its header.

    status ──first call──▶ thread: SHA-256 ──▶ "verified" or "refused: why"       (while the engine generates)
    verify ──▶ returns at once if that was done and the file is unchanged; else it computes the SHA-256

Clients may name any path, so nothing here blocks on one or reveals its content without the SHA-256: only regular files
of bounded size are read, one at a time, in bounded time, and every refusal has the same text. The reason goes to
standard error. Imports neither torch nor safetensors: vLLM's workers use it.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import BinaryIO

from rollover.files import open_regular
from rollover.logs import terminal

_REMEMBERED = 4
_MOST_HEADER_BYTES = 100_000_000  # as safetensors has it
# A file may have 8 times the bytes of the model: float32 for a model in 4 bits, or shared weights twice.
_MOST_TIMES = 8
_PATIENCE_S, _LEAST_BYTES_PER_S = 60.0, 20e6  # of a disk, or a network's folder
_REFUSED = "refused: "
VERIFYING, VERIFIED = "verifying", "verified"


@dataclass(frozen=True)
class _Identity:
    """Identity of a file: if one of these has changed, it is another file."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def from_stat(cls, found: os.stat_result) -> _Identity:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class _Timed:
    """A file for hashlib that raises TimeoutError after `ends` (time.monotonic)."""

    file: BinaryIO
    ends: float

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray, /) -> int:
        if time.monotonic() > self.ends:
            raise TimeoutError("reading it takes too long")
        return self.file.readinto(buffer)  # pyright: ignore[reportAttributeAccessIssue]


class Verifier:
    """Verifier of one engine, thread-safe. `model_bytes`: size of all weights. `patience_s`: time for a small file."""

    def __init__(self, model_bytes: int, patience_s: float = _PATIENCE_S) -> None:
        self._most_bytes = _MOST_TIMES * model_bytes + _MOST_HEADER_BYTES
        self._patience_s = patience_s
        self._lock, self._working = threading.Lock(), threading.Lock()
        # By path and SHA-256 of the last files: VERIFYING, a refusal, or the identity of the verified file.
        self._found: OrderedDict[tuple[str, str], str | _Identity] = OrderedDict()

    @property
    def limit_s(self) -> float:
        """Return the maximum time of a verification, unless a read never returns."""
        return self._limit_s(self._most_bytes)

    def status(self, path: str, sha256: str) -> str:
        """Return VERIFYING, VERIFIED or "refused: why" at once. The first call starts the work, in a thread.

        VERIFYING also while another file is verified. A refusal is returned once: it may be due to a disk or a network,
        and the next call retries.
        """
        if not isinstance(path, str) or not isinstance(sha256, str):
            return _REFUSED + _not_the_file(path)
        key = path, sha256
        with self._lock:
            known = self._found.get(key)
            if isinstance(known, str):
                if known != VERIFYING:
                    del self._found[key]
                return known
            if known is not None and known == _now(path):
                return VERIFIED
            if not self._working.acquire(blocking=False):
                return VERIFYING
            self._remember(key, VERIFYING)
        threading.Thread(target=self._work, args=(path, sha256), daemon=True, name="weights").start()
        return VERIFYING

    def verify(self, path: str, sha256: str) -> None:
        """Raise ValueError unless the file has this SHA-256 (hexadecimal)."""
        if not isinstance(path, str) or not isinstance(sha256, str):
            raise ValueError(_not_the_file(path))
        if not self._working.acquire(timeout=self.limit_s):
            raise ValueError("another weights file is being verified")
        with self._lock:
            known = self._found.get((path, sha256))
        if isinstance(known, _Identity) and known == _now(path):
            self._working.release()
            return
        found = self._work(path, sha256)
        if isinstance(found, str):
            with self._lock:
                self._found.pop((path, sha256), None)  # reported here
            raise ValueError(found.removeprefix(_REFUSED))

    # Private. `_working` is held.

    def _work(self, path: str, sha256: str) -> str | _Identity:
        found: str | _Identity = _REFUSED + _not_the_file(path)
        try:
            found = self._look(path, sha256)
            return found
        finally:
            with self._lock:
                self._remember((path, sha256), found)
            self._working.release()

    def _look(self, path: str, sha256: str) -> str | _Identity:
        try:
            with open_regular(path) as file:
                identity = _Identity.from_stat(os.fstat(file.fileno()))
                if identity.size > self._most_bytes:
                    raise ValueError(f"its {identity.size:,} bytes are more than the model's weights can have")
                timed = _Timed(file, time.monotonic() + self._limit_s(identity.size))
                # Before the content: a file without tensors is refused as fast as a missing one.
                _header(file)
                file.seek(0)
                if hashlib.file_digest(timed, "sha256").hexdigest() != sha256.lower():
                    raise ValueError("it has another SHA-256")
            return identity
        except (OSError, ValueError) as error:
            terminal.warning(f"weights refused: {path!r}: {error}")
            return _REFUSED + _not_the_file(path)

    def _limit_s(self, size: int) -> float:
        return self._patience_s + size / _LEAST_BYTES_PER_S

    def _remember(self, key: tuple[str, str], found: str | _Identity) -> None:
        self._found[key] = found
        while len(self._found) > _REMEMBERED:
            self._found.popitem(last=False)


def shapes_of(path: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name -> (dtype as in safetensors, shape) of a safetensors file, from its header.

    Raises ValueError for other files.
    """
    try:
        with open_regular(path) as file:
            return _header(file)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error


def _header(file: BinaryIO) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read the header. Raises ValueError if it is invalid."""
    try:
        size = os.fstat(file.fileno()).st_size
        # Files in /proc have size 0, and a read may block.
        length = int.from_bytes(file.read(8), "little") if size > 8 else size
        if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(length))
        return {
            name: (entry["dtype"], tuple(map(int, entry["shape"])))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _now(path: str) -> _Identity | None:
    """Return the identity of the file at the path; None if it does not exist."""
    try:
        return _Identity.from_stat(os.stat(path))
    except (OSError, ValueError):
        return None


def _not_the_file(path: object) -> str:
    return (
        f"{path} is not there for this server, or not the weights file with that SHA-256. Does this machine see the"
        " folder that it was written to? The server's log has the reason"
    )
