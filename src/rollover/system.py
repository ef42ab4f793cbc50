"""Properties of this machine: a supported operating system, cores, and access to the hub.

Owns the words for what is missing. Imports nothing heavy: the command line asks before it does anything.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path

# Of a container (Linux's control groups, version 2): "<microseconds of all cores> <in so many>", or "max ...".
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def refusal() -> str:
    """Why Rollover cannot run on this operating system, in one sentence; "" where it can (Linux and macOS)."""
    if sys.platform in ("win32", "cygwin"):
        return "Rollover does not run on Windows itself: install it in the Windows Subsystem for Linux (wsl --install)"
    return ""


def cores(limit: Path = CPU_LIMIT) -> int:
    """Cores that this process may use: those that it may run on, and no more than a container's limit pays for."""
    num = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        microseconds, period = map(int, limit.read_text().split())
        return max(1, min(num, math.ceil(microseconds / period)))
    return num


def hub_is_away() -> str:
    """Why the Hugging Face hub cannot be asked; "" where it can be, or may be (a proxy looks names up itself).

    The libraries that would ask it try again for half a minute.
    """
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    host = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        if not getproxies().keys() - {"no"}:  # "no": the hosts that are reached without one
            socket.getaddrinfo(host, None)
    except OSError:
        return f"{host} cannot be reached"
    return ""
