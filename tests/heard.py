"""Messages that `rollover` logs, collected until the end of the test (conftest.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from rollover.logs import messages_to

Listener = TypeVar("Listener", bound=list[str] | Callable[[str], None])
_listening = ExitStack()


def hear(listener: Listener) -> Listener:
    """Send every message of this test to a function, or to a list, which is returned."""
    _listening.enter_context(messages_to(listener if callable(listener) else listener.append))
    return listener


def end() -> None:
    """Collect no more."""
    _listening.close()
