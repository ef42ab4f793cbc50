"""glibc's allocator, set for tensors: what is freed stays for the next one, and goes back between phases."""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """By default large blocks go back to the system and every page of the next one faults: sampling took 4 times as
    long (docs/log.md). Does nothing where the C library is another."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        # Blocks above this still come and go alone: among the others they would leave holes that nothing fills.
        libc.mallopt(_M_MMAP_THRESHOLD, 64 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def return_freed_memory() -> None:
    """Give what is free back to the system: generation and training do not need each other's leftovers."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
