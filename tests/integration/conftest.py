"""What every integration test gets: `rollover train` in this process changes signal handlers and torch's threads."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import launcher
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


@pytest.fixture(scope="module", autouse=True)
def forked_children() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(subprocess, "Popen", launcher.Forked)
        yield
