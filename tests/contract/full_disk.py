"""Places without room, for tests."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest


def full_above(monkeypatch: pytest.MonkeyPatch, folder: str, num_bytes: int) -> None:
    """No file in `folder` may become larger."""

    def checked(function: Callable, size: Callable[..., int]) -> Callable:
        def call(file: int, *rest: Any) -> Any:
            if os.readlink(f"/proc/self/fd/{file}").startswith(folder) and size(*rest) > num_bytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(file, *rest)

        return call

    monkeypatch.setattr(os, "posix_fallocate", checked(os.posix_fallocate, lambda offset, length: offset + length))
    monkeypatch.setattr(os, "pwrite", checked(os.pwrite, lambda data, offset: offset + len(data)))
