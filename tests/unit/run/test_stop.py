"""The signals that stop a run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from rollover.run.stop import Stop


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_end_of_the_run_does_nothing(number: int) -> None:
    said: list[str] = []

    async def run() -> None:
        Stop().listen(said.append)

    asyncio.run(run())
    for _ in range(2):
        os.kill(os.getpid(), number)
    assert said == []


def test_the_first_signal_asks_and_the_second_interrupts() -> None:
    said: list[str] = []

    async def run() -> None:
        stop, asked = Stop(), asyncio.Event()
        stop.on_stop = asked.set
        stop.listen(said.append)
        os.kill(os.getpid(), signal.SIGTERM)
        await asked.wait()
        assert stop.requested and len(said) == 1
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert len(said) == 1


def test_a_signal_while_a_line_is_being_printed_is_said_after_it() -> None:
    """The output is a pipe whose reader is slow: Python does not let the handler print into the middle of a line."""
    said: list[str] = []
    printing = True

    def say(line: str) -> None:
        nonlocal printing
        if printing:
            printing = False
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")
        said.append(line)

    async def run() -> None:
        stop, asked = Stop(), asyncio.Event()
        stop.on_stop = asked.set
        stop.listen(say)
        os.kill(os.getpid(), signal.SIGINT)
        await asked.wait()
        assert stop.requested and len(said) == 1 and said[0].startswith("stopping: ")

    asyncio.run(run())
