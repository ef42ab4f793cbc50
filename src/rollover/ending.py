"""The end of a run, and of its process, in bounded time, whatever code of the user's own goes on.

    run_bounded   as asyncio.run: a task that does not end when it is cancelled is named, and left behind; a task of the
                  user's own that exits has failed, and the run goes on
    bound_end     of the command line's process: a thread that does not end is named, and left behind with it

Owns what is said of who hangs. What a run does at its end is none of its business.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rollover.functions import explained, place_of_user

Result = TypeVar("Result")
GRACE_S = 30.0
"""What hangs at the end has so long where nothing else is known (watchdog.grace_s)."""
_QUIET_S = 1.0  # of a wait that is not worth a line
_LOOK_S = 0.02
_CANCEL_AGAIN_S = 1.0
_MOST_NAMED = 5
_numbers = itertools.count()
_grace_s = GRACE_S  # of the last run of this process
_left_behind: set[threading.Thread] = set()  # they had their time


def run_bounded(work: Coroutine[Any, Any, Result], grace_s: float) -> Result:
    """What `work` returns, on an event loop of its own, as by asyncio.run. At its end every task that is left is
    cancelled; those that go on, and threads of asyncio.to_thread, have `grace_s` seconds. Who still hangs then is named
    and left behind: a task never gets on again, a thread holds up the end of the process.

    SystemExit in another task than that of `work`, as where code of the user's own starts one, is raised where that
    task is awaited, and ends no more than that."""
    global _grace_s
    _grace_s = grace_s
    runner, threads = asyncio.Runner(), f"to_thread-{next(_numbers)}"
    loop, executor, error = runner.get_loop(), ThreadPoolExecutor(thread_name_prefix=threads), None
    loop.set_default_executor(executor)
    task = loop.create_task(work)
    try:
        _run(runner.run, lambda: _until_done(task), [task])
        return task.result()
    except asyncio.CancelledError as cancelled:
        error = ValueError(
            "the run was cancelled from within: a function of your own cancels tasks that are not its own, as by"
            " asyncio.all_tasks(). Mend it, and go on with --resume"
        )
        raise error from cancelled
    except BaseException as raised:
        error = raised
        raise
    finally:
        try:
            executor.shutdown(wait=False, cancel_futures=True)
            _cancel_all(loop)
            waiting = loop.create_task(_wait_for_all(work, threads, grace_s, error))
            _run(loop.run_until_complete, lambda: waiting, [waiting])
        finally:
            _leave_behind(loop)
            asyncio.set_event_loop(None)
            loop.close()


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks of our own until they have ended: a library may forget a cancellation that comes as its own time-out
    is up, as where the event loop stood still."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)


def bound_end(code: int) -> None:
    """The process is to end now, with this exit code: from here on it takes no longer than the grace of the last run,
    though threads of the user's own may go on for ever."""
    threading.Thread(target=_end_late, args=(code, _grace_s), daemon=True, name="end").start()


# Private


def _run(run: Callable[[Any], object], make: Callable[[], Any], tasks: Sequence[asyncio.Task[Any]]) -> None:
    """`run` what `make` makes, until these tasks have ended. A task that exits stops its event loop at once, wherever
    it was started; it has ended then, and the loop goes on where it was."""
    told: set[str] = set()
    while True:
        try:
            run(make())
            return
        except SystemExit as error:
            if any(task.done() for task in tasks):
                raise
            if (why := explained(error)) not in told and len(told) < _MOST_NAMED:
                told.add(why)
                _say(f"a task of your own has ended by {why}: it has failed, and nothing else ends by that")


async def _until_done(task: asyncio.Task[Any]) -> None:
    """Cancelled, as a Ctrl-C does before the run listens to signals, it cancels the task and waits for it."""
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        raise


async def _wait_for_all(
    work: Coroutine[Any, Any, Any], threads: str, grace_s: float, error: BaseException | None
) -> None:
    """Until all tasks of this loop, and all threads whose names begin so, have ended, or the time is up. It begins when
    `work` has ended, which a Ctrl-C may have cut off: that has limits of its own."""
    generators = asyncio.ensure_future(asyncio.get_running_loop().shutdown_asyncgens())
    began, us, told = time.monotonic(), asyncio.current_task(), False
    while True:
        tasks = {task for task in asyncio.all_tasks() if task is not us}
        hanging = [thread for thread in threading.enumerate() if thread.name.startswith(f"{threads}_")]
        if not tasks and not hanging:
            return
        if any(task.get_coro() is work for task in tasks):
            began = time.monotonic()
        seconds = time.monotonic() - began
        if seconds >= grace_s:
            generators.cancel()
            _say(f"{_named(tasks, hanging)} did not end within {grace_s:g} s (watchdog.grace_s): left behind")
            _left_behind.update(hanging)
            return
        if seconds >= _QUIET_S and not told:
            told = True
            how = "is over" if error is None else f"has failed ({explained(error)})"
            _say(f"the run {how}. It waits for what was cancelled, {grace_s:g} s at most: {_named(tasks, hanging)}")
        if tasks:
            await asyncio.wait(tasks, timeout=_LOOK_S)
        else:
            await asyncio.sleep(_LOOK_S)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen: nobody else asks for it


def _leave_behind(loop: asyncio.AbstractEventLoop) -> None:
    """What is pending is never freed: that would run its code once more, without an event loop and perhaps for ever."""
    for task in asyncio.all_tasks(loop):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def _end_late(code: int, grace_s: float) -> None:
    """In a thread that ends with the process, if that ends by itself."""
    time.sleep(min(_QUIET_S, grace_s))
    threads = _hanging_threads()
    if late := [thread for thread in threads if thread not in _left_behind]:
        _say(f"the process waits for what goes on, {grace_s:g} s at most: {_named((), late)}")
    if late or not threads:
        time.sleep(max(0.0, grace_s - _QUIET_S))
    if not (threads := _hanging_threads()):
        return  # it is at work on its own end
    _say(f"{_named((), threads)} did not end within {grace_s:g} s (watchdog.grace_s): the process ends all the same")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # boundary: a pipe without a reader
            stream.flush()
    os._exit(code)


def _hanging_threads() -> list[threading.Thread]:
    """For which the interpreter waits at its end."""
    return [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]


def _named(tasks: Iterable[asyncio.Task[Any]], threads: Iterable[threading.Thread]) -> str:
    """`episode 3-1 (agent.py:12), the thread worker (agent.py:30)`. Tasks that only wait for others are left out."""
    places = {task: place_of_user(_frames(task.get_coro())) for task in tasks}
    named = [f"{task.get_name()} ({place})" for task, place in places.items() if place]
    named = named or [task.get_name() for task in places]
    for thread in threads:
        frames = traceback.walk_stack(sys._current_frames().get(thread.ident or 0))
        place = place_of_user(reversed([(frame.f_code.co_filename, line) for frame, line in frames]))
        named.append(f"the thread {thread.name}" + (f" ({place})" if place else ""))
    more = [f"{len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    return ", ".join(named[:_MOST_NAMED] + more)


def _frames(coroutine: Any) -> Iterator[tuple[str, int]]:
    """(file name, line) of a suspended coroutine and of what it awaits, the outermost first."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        print(f"rollover: {line}", file=sys.stderr, flush=True)
