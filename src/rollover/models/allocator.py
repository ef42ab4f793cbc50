"""Memory settings of a process that computes: glibc's allocator for tensors, and oneDNN's cache of shapes."""

from __future__ import annotations

import contextlib
import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# Number of matmul shapes with cached code and scratch memory: of the process, and of each thread.
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_SHAPES = "128"


def keep_freed_memory() -> None:
    """Keep freed blocks for the next tensor instead of returning them to the system. No-op without glibc.

    By default every page of the next large block faults: sampling took 4 times as long (docs/log.md).
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        # Larger blocks are still mapped alone: among the others they would leave holes.
        libc.mallopt(_M_MMAP_THRESHOLD, 64 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def keep_few_shapes() -> None:
    """Bound the number of shapes that oneDNN caches, unless the user has set it. Call before the first matmul.

    In bfloat16 each number of tokens is a shape of every layer's size, and takes half a megabyte. Prefills and
    micro-batches always bring new ones: at oneDNN's own limit of 1,024 a model of 25 MB grew by 850 MB (docs/log.md).
    """
    for variable in _CACHES:
        os.environ.setdefault(variable, _SHAPES)


def return_freed_memory() -> None:
    """Return free memory to the system: generation and training do not share freed blocks."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
