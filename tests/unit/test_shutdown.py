"""The end of a run and of its process: bounded, with the names of those that hang."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollover.processes import child_environment
from rollover.shutdown import run_bounded


async def never_ends(free: threading.Event) -> None:
    while not free.is_set():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass


def test_a_task_that_swallows_its_cancellation_is_named_and_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    free = threading.Event()

    async def work() -> int:
        task = asyncio.create_task(never_ends(free), name="episode 3-1")
        await asyncio.sleep(0.01)
        assert not task.done()
        return 7

    began = time.monotonic()
    assert run_bounded(work(), 1.2) == 7
    assert time.monotonic() - began < 30
    waits, left = capsys.readouterr().err.splitlines()
    assert waits.startswith("rollover: the run is over. It waits for cancelled tasks, 1.2 s at most: episode 3-1 (")
    assert "test_shutdown.py:" in waits and left.startswith("rollover: episode 3-1 (")
    assert left.endswith("did not end within 1.2 s (watchdog.grace_s): left behind")
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def test_the_error_is_said_before_the_wait_and_raised_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    free = threading.Event()

    async def work() -> None:
        asyncio.create_task(never_ends(free))  # noqa: RUF006
        await asyncio.sleep(0.01)
        raise KeyError("no such page")

    with pytest.raises(KeyError):
        run_bounded(work(), 1.2)
    assert "the run has failed (KeyError: 'no such page' (" in capsys.readouterr().err


def test_a_thread_of_to_thread_that_hangs_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    free = threading.Event()

    async def work() -> None:
        asyncio.ensure_future(asyncio.to_thread(free.wait, 60))
        await asyncio.sleep(0.01)

    began = time.monotonic()
    run_bounded(work(), 0.1)
    assert time.monotonic() - began < 30
    assert "the thread to_thread_" in capsys.readouterr().err
    free.set()


def test_what_ends_when_it_is_cancelled_says_nothing_and_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[str] = []
    left: list[object] = []

    async def slowly() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            ended.append("task")

    async def numbers() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(0.01)
            ended.append("generator")

    async def work() -> None:
        left.extend([asyncio.create_task(slowly()), generator := numbers()])
        await anext(generator)
        await asyncio.sleep(0.01)

    run_bounded(work(), 30)
    assert sorted(ended) == ["generator", "task"] and not capsys.readouterr().err


def test_code_that_cancels_the_run_itself_is_an_error_of_the_user() -> None:
    async def work() -> None:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(1)

    with pytest.raises(ValueError, match="the run was cancelled from within"):
        run_bounded(work(), 1)


PROGRAM = """
import sys, threading
from rollover import cli

def verb(words):
    threading.Thread(target=threading.Event().wait, name="mine").start()
    print("done")
    {end}

cli.run_verb = verb
from rollover import shutdown
shutdown.run_bounded(__import__("asyncio").sleep(0), 1.2)
sys.exit(cli.main())
"""


@pytest.mark.parametrize(("end", "code"), [("return 0", 0), ("return 2", 2), ("raise KeyError('x')", 1)])
def test_a_thread_that_hangs_does_not_hold_up_the_process(end: str, code: int, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM.replace("{end}", end)))
    done = subprocess.run([sys.executable, file], env=child_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == code and done.stdout == "done\n"
    *error, waits, ends = done.stderr.splitlines()
    assert ("KeyError: 'x'" in error[-1]) if code == 1 else not error
    assert waits == "rollover: the process waits for what goes on, 1.2 s at most: the thread mine"
    assert ends.endswith("the thread mine did not end within 1.2 s (watchdog.grace_s): the process ends all the same")


def test_a_task_that_exits_ends_itself_alone(capsys: pytest.CaptureFixture[str]) -> None:
    async def exits(code: int) -> None:
        await asyncio.sleep(0)
        sys.exit(code)

    async def work() -> list[str]:
        seen: list[str] = []
        for start in (asyncio.gather, asyncio.wait):
            tasks = [asyncio.ensure_future(exits(0)), asyncio.ensure_future(asyncio.sleep(0.01))]
            try:
                await (asyncio.gather(*tasks) if start is asyncio.gather else asyncio.wait(tasks))
            except SystemExit as error:
                seen.append(f"exit {error.code}")
            seen.append(f"{tasks[0].exception()!r}")
        asyncio.get_running_loop().call_soon(sys.exit, 4)
        await asyncio.sleep(0.01)
        return seen

    assert run_bounded(work(), 30) == ["exit 0", "SystemExit(0)", "SystemExit(0)"]
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2 and "asyncio task of user code ended by SystemExit: 0 (" in err[0]
    assert "test_shutdown.py:" in err[0] and "SystemExit: 4" in err[1]


def test_an_exit_while_the_run_ends_holds_nothing_up() -> None:
    async def exits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            sys.exit(3)

    ended: list[int] = []

    async def ends() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            ended.append(1)

    async def work() -> int:
        for task in (exits(), ends()):
            asyncio.ensure_future(task)
        await asyncio.sleep(0.01)
        return 7

    assert run_bounded(work(), 30) == 7 and ended


def test_an_exit_of_the_work_itself_is_raised() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        sys.exit(3)

    with pytest.raises(SystemExit) as exit:
        run_bounded(work(), 1)
    assert exit.value.code == 3


@pytest.fixture
def heeded() -> Iterator[None]:
    """Ctrl-C, which what runs in the background of a shell ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_ctrl_c_before_anybody_listens_cancels_the_work(heeded: None) -> None:
    cancelled: list[int] = []

    async def work() -> None:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    with pytest.raises(KeyboardInterrupt):
        run_bounded(work(), 30)
    assert cancelled


def test_second_ctrl_c_is_reported_once(heeded: None, capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        run_bounded(work(), 30)
    gc.collect()
    assert "never retrieved" not in capsys.readouterr().err
