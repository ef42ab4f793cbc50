"""The warning comes from its own thread while the main thread is held up, and only then. Time is the tests' own."""

from __future__ import annotations

import asyncio
import threading

import pytest

import virtual_time
from heard import hear
from rollover.run import blocked_warning as warning_module


class Heard(list):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def __call__(self, line: str) -> None:
        self.append(line)
        self.threads.add(threading.current_thread().name)


def text(seconds: float) -> str:
    return f"this takes {seconds:.2f} s"


def lines(*seconds: float) -> list[str]:
    return [f"watchdog: {text(of)}" for of in seconds]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> virtual_time.ThreadClock:
    clock = virtual_time.ThreadClock()
    monkeypatch.setattr(warning_module, "time", clock)
    monkeypatch.setattr(warning_module, "threading", clock)
    return clock


def test_warns_in_time_and_at_doubling_times(clock: virtual_time.ThreadClock) -> None:
    heard = hear(Heard())
    with warning_module.over(text, 5):
        clock.let_pass(4.9)
        assert heard == []
        clock.let_pass(50)
    assert heard == lines(5, 10, 20, 40) and heard.threads == {"blocked-warning"}
    clock.let_pass(1000)
    assert len(heard) == 4 and clock.num_alive == 0


def test_no_warning_when_fast_or_off(clock: virtual_time.ThreadClock) -> None:
    heard = hear(Heard())
    with warning_module.over(text, 5):
        clock.let_pass(1)
    clock.let_pass(100)
    assert len(clock.threads) == 1 and clock.num_alive == 0
    with warning_module.over(text, 0) as restart:
        restart()
        clock.let_pass(100)
    assert heard == [] and len(clock.threads) == 1, "what is off has no thread"


def test_a_sign_of_life_starts_the_time_anew(clock: virtual_time.ThreadClock) -> None:
    heard = hear(Heard())
    with warning_module.over(text, 5) as restart:
        for _ in range(8):
            clock.let_pass(4)
            restart()
            clock.settle()
        assert heard == []
        clock.let_pass(11)
        assert heard == lines(5, 10)
        restart()
        clock.let_pass(6)
    assert heard == lines(5, 10, 5)


def test_blocked_loop_warns_and_idle_loop_does_not(clock: virtual_time.ThreadClock) -> None:
    heard = hear(Heard())

    async def go() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_time.VirtualLoop)
        with warning_module.over_loop(text, 8, loop.call_later):
            await asyncio.sleep(100)
            assert heard == []
            loop.let_pass(20)  # a step of the engine that does not end
            assert heard == lines(8, 16)
            await asyncio.sleep(100)
            assert len(heard) == 2
        await asyncio.sleep(100)
        with warning_module.over_loop(text, 0, loop.call_later):
            loop.let_pass(100)

    virtual_time.run(go(), clock.let_pass)
    assert heard == lines(8, 16) and clock.num_alive == 0 and len(clock.threads) == 1


def test_an_error_ends_it_too(clock: virtual_time.ThreadClock) -> None:
    heard = hear(Heard())
    with pytest.raises(RuntimeError), warning_module.over(text, 5):
        raise RuntimeError
    clock.let_pass(100)
    assert heard == [] and clock.num_alive == 0


def test_in_real_time() -> None:
    """The one test on a clock and threads of the system: held up until it has spoken twice."""
    heard, spoken = Heard(), threading.Event()

    def say(line: str) -> None:
        heard(line)
        if len(heard) == 2:
            spoken.set()

    hear(say)
    with warning_module.over(text, 0.01):
        assert spoken.wait(120)
    first, second = (float(line.split()[-2]) for line in heard[:2])
    assert first >= 0.01 and second >= 2 * first - 0.02 and heard.threads == {"blocked-warning"}
