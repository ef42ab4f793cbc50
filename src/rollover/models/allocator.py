"""Memory of a process that computes: glibc's allocator, set for tensors, and how much oneDNN keeps of past shapes."""

from __future__ import annotations

import contextlib
import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# How many shapes of matmuls oneDNN keeps code and scratch memory for: of the process, and of each of its threads.
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_SHAPES = "128"


def keep_freed_memory() -> None:
    """By default large blocks go back to the system and every page of the next one faults: sampling took 4 times as
    long (docs/log.md). Does nothing where the C library is another."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        # Blocks above this still come and go alone: among the others they would leave holes that nothing fills.
        libc.mallopt(_M_MMAP_THRESHOLD, 64 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def keep_few_shapes() -> None:
    """Let oneDNN forget old shapes, unless the user has said how many it keeps: before the first matmul.

    In bfloat16 each number of tokens is a shape of every layer's size, and takes half a megabyte. Prefills and
    micro-batches have ever new ones: up to 1,024, its own limit, a model of 25 MB had grown by 850 MB (docs/log.md).
    """
    for variable in _CACHES:
        os.environ.setdefault(variable, _SHAPES)


def return_freed_memory() -> None:
    """Give what is free back to the system: generation and training do not need each other's leftovers."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
