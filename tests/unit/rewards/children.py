"""Whether child processes live: what the tests of reward workers ask."""

from __future__ import annotations

import time
from collections.abc import Iterable


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pids: Iterable[int], limit_s: float = 10.0) -> bool:
    """Whether all of them have ended within `limit_s`."""
    pids, deadline = list(pids), time.monotonic() + limit_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))
