"""What `rollover` logs, collected until the end of the test (conftest.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rollover import logs

Listener = TypeVar("Listener", bound=list[str] | Callable[[str], None])
_added: list[Callable[[str], None]] = []


def hear(listener: Listener) -> Listener:
    """Send every message of this test to a function, or to a list, which is returned."""
    function: Callable[[str], None] = listener if callable(listener) else listener.append
    _added.append(function)
    logs._open_runs.append(function)
    return listener


def end() -> None:
    """Collect no more."""
    while _added:
        logs._open_runs.remove(_added.pop())
