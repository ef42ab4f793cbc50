"""What every integration test gets: `rollover train` in this process changes signal handlers and torch's threads."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for number, handler in before.items():
        signal.signal(number, handler)
