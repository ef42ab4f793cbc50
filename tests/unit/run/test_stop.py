"""The signals that stop a run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from heard import hear
from rollover.run.stop import Stop, signals_to, take_signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_end_of_the_run_does_nothing(number: int) -> None:
    said: list[str] = hear([])

    async def run() -> None:
        stop = Stop()
        stop.listen(lambda: None)
        take_signals(stop.on_signal)

    asyncio.run(run())
    for _ in range(2):
        os.kill(os.getpid(), number)
    assert said == []


def test_the_first_signal_asks_and_the_second_interrupts() -> None:
    said: list[str] = hear([])

    async def run() -> None:
        stop, asked = Stop(), asyncio.Event()
        stop.listen(asked.set)
        take_signals(stop.on_signal)
        os.kill(os.getpid(), signal.SIGTERM)
        await asked.wait()
        assert stop.requested and len(said) == 1
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert len(said) == 1


def test_signal_during_print_is_reported_after_it() -> None:
    """The output is a pipe whose reader is slow: Python does not let the handler print into the middle of a line."""
    said: list[str] = []
    printing = True

    def say(line: str) -> None:
        nonlocal printing
        if printing:
            printing = False
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")
        said.append(line)

    hear(say)

    async def run() -> None:
        stop, asked = Stop(), asyncio.Event()
        stop.listen(asked.set)
        take_signals(stop.on_signal)
        os.kill(os.getpid(), signal.SIGINT)
        await asked.wait()
        assert stop.requested and len(said) == 1 and said[0].startswith("stopping: ")

    asyncio.run(run())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0), (2, 0, 1)])
def test_blocks_that_take_the_signals_may_end_in_any_order(order: tuple[int, ...]) -> None:
    before = signal.getsignal(signal.SIGINT)
    got: list[int] = []
    blocks = [ExitStack() for _ in order]
    for i, block in enumerate(blocks):
        block.enter_context(signals_to(lambda number, frame, i=i: got.append(i)))
    for i in order:
        os.kill(os.getpid(), signal.SIGINT)
        still_open = [j for j in range(len(blocks)) if j not in order[: order.index(i)]]
        assert got.pop() == max(still_open) and not got
        blocks[i].close()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("how", ["within", "unless_requested"])
def test_uncancellable_work_is_abandoned_after_its_grace(how: str) -> None:
    free = asyncio.Event()

    async def never_ends() -> None:
        while not free.is_set():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

    async def run() -> object:
        stop = Stop()
        stop.listen(lambda: None)
        asyncio.get_running_loop().call_later(0.01, stop.request)
        ended = await asyncio.wait_for(getattr(stop, how)(never_ends(), 0.05), 30)
        free.set()
        return ended

    assert not asyncio.run(run())
