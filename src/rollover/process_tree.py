"""Processes of this machine: which descend from which, what they use, and the end of a family. By psutil."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def kill(family: Iterable[psutil.Process]) -> None:
    """SIGKILL these processes, and no other one that has the id of one of them by now."""
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.kill()


def descendants(root: int) -> set[psutil.Process]:
    """Return the processes that `root` started, and those that they did, as far as they run."""
    with contextlib.suppress(psutil.Error):
        return set(filter(is_running, psutil.Process(root).children(recursive=True)))
    return set()


def is_running(process: psutil.Process) -> bool:
    """Whether it has not ended: a zombie only waits for its parent to collect its status."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def has_ended(pid: int) -> bool:
    """Whether no process of this id runs."""
    try:
        return not is_running(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped (SIGSTOP), and does not go on yet."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def resident_bytes(root: int) -> int:
    """Memory of `root` and its descendants, what they share counted for each of them."""
    total = 0
    for process in (psutil.Process(root), *descendants(root)):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total
