"""The alarm speaks from its own thread while the main thread is held up, and only then."""

from __future__ import annotations

import asyncio
import threading
import time

from rollover.train.alarm import Alarm


class Heard(list):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def __call__(self, line: str) -> None:
        self.append(line)
        self.threads.add(threading.current_thread().name)


def text(seconds: float) -> str:
    return f"this takes {seconds:.2f} s"


def alarm_threads() -> int:
    return sum(t.name == "alarm" for t in threading.enumerate())


def times(heard: Heard) -> list[float]:
    return [float(line.split()[-2]) for line in heard]


def test_warns_in_time_and_at_doubling_times() -> None:
    heard = Heard()
    with Alarm(heard).over(text, 0.05):
        time.sleep(0.5)
    assert heard[0].startswith("watchdog: this takes 0.0") and heard.threads == {"alarm"}
    assert 3 <= len(heard) <= 4
    assert all(b >= 2 * a - 0.02 for a, b in zip(times(heard), times(heard)[1:], strict=False))


def test_is_silent_when_nothing_takes_long_and_when_it_is_off() -> None:
    heard = Heard()
    with Alarm(heard).over(text, 5):
        pass
    with Alarm(heard).over(text, 0) as restart:
        restart()
        time.sleep(0.02)
    time.sleep(0.02)
    assert heard == [] and alarm_threads() == 0


def test_a_sign_of_life_starts_the_time_anew() -> None:
    heard = Heard()
    with Alarm(heard).over(text, 0.2) as restart:
        for _ in range(8):
            time.sleep(0.04)
            restart()
        assert heard == []
        time.sleep(0.3)
    assert len(heard) == 1 and 0.2 <= times(heard)[0] < 0.3


def test_an_event_loop_that_waits_is_no_reason_one_that_stands_still_is() -> None:
    heard, num_heard = Heard(), []

    async def go() -> None:
        with Alarm(heard).over_loop(text, 0.1, asyncio.get_running_loop().call_later):
            await asyncio.sleep(0.3)
            assert heard == []
            time.sleep(0.25)  # a step of the engine that does not end
            assert 1 <= len(heard) <= 2
            num_heard.append(len(heard))
            await asyncio.sleep(0.15)
        await asyncio.sleep(0.15)
        with Alarm(heard).over_loop(text, 0, asyncio.get_running_loop().call_later):
            time.sleep(0.05)

    asyncio.run(go())
    assert num_heard == [len(heard)] and alarm_threads() == 0


def test_an_error_ends_it_too() -> None:
    heard = Heard()
    try:
        with Alarm(heard).over(text, 0.05):
            raise RuntimeError
    except RuntimeError:
        pass
    time.sleep(0.1)
    assert heard == []
