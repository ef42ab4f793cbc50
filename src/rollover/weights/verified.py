"""A weights file that somebody else names: whether it is the file that they mean, and what it holds.

    status ──first call──▶ thread: SHA-256 ──▶ "verified" or "refused: why"       (while the engine generates)
    verify ──▶ nothing to do where that was done, and the file is still the same; else the SHA-256 now

Owns what was verified. Reads no tensor, and imports neither torch nor safetensors: workers of other engines use it.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass

_REMEMBERED = 4
_MOST_HEADER_BYTES = 100_000_000  # as safetensors has it
VERIFYING, VERIFIED = "verifying", "verified"


@dataclass(frozen=True)
class _Identity:
    """A file as it was: where one of these has changed, it is another."""

    path: str
    sha256: str
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: str, sha256: str) -> _Identity:
        """ValueError where there is no such file."""
        try:
            found = os.stat(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{path}: {reason}. Does this machine see the folder that it was written to?") from error
        return cls(path, sha256, found.st_size, found.st_mtime_ns, found.st_ino)


class Verifier:
    """Of one engine. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[_Identity, str] = OrderedDict()  # the last files: VERIFYING, VERIFIED or a refusal

    def status(self, path: str, sha256: str) -> str:
        """VERIFYING, VERIFIED or "refused: why", at once: its first call for a file begins the work, in a thread.

        A refusal is told once: it may have been a disk's, or a network's, and the next call looks again.
        """
        try:
            identity = _Identity.of(path, sha256)
        except ValueError as error:
            return f"refused: {error}"
        with self._lock:
            if (known := self._found.get(identity)) is not None:
                if known not in (VERIFYING, VERIFIED):
                    del self._found[identity]
                return known
            self._remember(identity, VERIFYING)
        threading.Thread(target=self._verify, args=(identity,), daemon=True, name="weights").start()
        return VERIFYING

    def verify(self, path: str, sha256: str) -> None:
        """Return if the file has this SHA-256 (hexadecimal). ValueError with the reason if not."""
        identity = _Identity.of(path, sha256)
        with self._lock:
            known = self._found.get(identity)
        if known != VERIFIED:  # a refusal may have been a disk's: it is looked at again
            known = self._verify(identity)
        if known != VERIFIED:
            raise ValueError(known.removeprefix("refused: "))

    def _verify(self, identity: _Identity) -> str:
        try:
            with open(identity.path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found = VERIFIED
            if digest != identity.sha256.lower():
                found = f"refused: {identity.path} is damaged: it has the SHA-256 {digest}, not {identity.sha256}"
        except OSError as error:
            found = f"refused: {identity.path}: {error.strerror}"
        with self._lock:
            self._remember(identity, found)
        return found

    def _remember(self, identity: _Identity, found: str) -> None:
        self._found[identity] = found
        while len(self._found) > _REMEMBERED:
            self._found.popitem(last=False)


def shapes_of(path: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a safetensors file holds, by its header alone: name -> (dtype as safetensors calls it, shape).

    ValueError where it is no such file.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        return {
            name: (entry["dtype"], tuple(map(int, entry["shape"])))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
