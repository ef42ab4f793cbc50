"""The timer of the event log: a write that is late delays the next one by no more than the interval."""

from __future__ import annotations

import asyncio

import pytest

from rollover.run.event_log import Timer


def events(*, writes: int, error: bool = False) -> list[str]:
    """What happens, in order, if the first write returns only after the beat that did not wait for it."""
    seen: list[str] = []

    async def run() -> None:
        beaten, enough = asyncio.Event(), asyncio.Event()

        async def write() -> None:
            seen.append("write")
            if seen.count("write") == writes:
                enough.set()
            if not beaten.is_set():
                await beaten.wait()
                if error:
                    raise OSError("the disk")
            seen.append("written")

        def beat() -> None:
            seen.append("beat")
            beaten.set()

        timer = Timer(0.05, write, beat)
        timer.start()
        try:
            while not enough.is_set():
                await asyncio.sleep(0.001)
                timer.check()
        finally:
            timer.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    return seen


def test_a_late_write_is_not_followed_by_an_idle_interval() -> None:
    assert events(writes=2)[:4] == ["write", "beat", "written", "write"]


def test_a_late_write_ends_the_timer_with_its_error() -> None:
    with pytest.raises(OSError, match="the disk"):
        events(writes=2, error=True)
