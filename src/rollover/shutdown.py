"""asyncio.run, and the end of the process, in bounded time, even if user code hangs.

run_bounded            asyncio.run: a task that ignores its cancellation is logged and left behind
cancel_in_background   cancels a task without waiting for its end
bound_end              the command line's process: a thread that does not end is logged and left behind
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rollover.functions import explained, place_of_user
from rollover.logs import terminal

Result = TypeVar("Result")
GRACE_S = 30.0
"""Default of watchdog.grace_s: the time for code that hangs at the end."""
_QUIET_S = 1.0  # a shorter wait is not reported
_LOOK_S = 0.02
_CANCEL_AGAIN_S = 1.0
_MOST_NAMED = 5
_grace_s = GRACE_S  # of the last run of this process
_waited = False  # whether that run has waited for threads already
_cancelled: set[asyncio.Future[Any]] = set()  # asyncio drops tasks without a reference


def run_bounded(work: Coroutine[Any, Any, Result], grace_s: float) -> Result:
    """Return the result of `work`, as asyncio.run.

    At the end all other tasks are cancelled. Those that go on, and threads of asyncio.to_thread, get `grace_s` seconds;
    the rest is named and left behind. SystemExit in another task than that of `work` fails that task alone. ValueError
    where the user's code cancels the run itself.
    """
    global _grace_s, _waited
    runner, executor, error = asyncio.Runner(), ThreadPoolExecutor(thread_name_prefix="to_thread"), None
    loop = runner.get_loop()
    loop.set_default_executor(executor)
    task = loop.create_task(work)

    async def result() -> Result:  # Runner.run cancels this task, and thereby `task`, on Ctrl-C
        return await task

    try:
        return _complete(lambda: runner.run(result()), task)
    except asyncio.CancelledError as cancelled:
        error = ValueError(
            "the run was cancelled from within: a custom function cancels tasks that are not its own, as by"
            " asyncio.all_tasks(). Fix it, and resume with --resume"
        )
        raise error from cancelled
    except BaseException as raised:
        error = raised
        raise
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        if task.done() and not task.cancelled():
            task.exception()  # it is `error`, or came with it: or asyncio logs it
        for other in asyncio.all_tasks(loop):
            other.cancel()
            other.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio logs the error
        ending = loop.create_task(_end_others(task, executor, grace_s, error))
        try:
            _complete(lambda: loop.run_until_complete(ending), ending)
        finally:
            _grace_s, _waited = grace_s, any(thread.is_alive() for thread in executor._threads)
            for left in asyncio.all_tasks(loop):  # never freed: that would run its code again, perhaps for ever
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
            asyncio.set_event_loop(None)
            loop.close()  # Runner.close would wait for what is left


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks of our own until they have ended: a library may forget a cancellation that comes as its own time-out
    is up, as where the event loop stood still."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)


def cancel_in_background(task: asyncio.Future[Any]) -> None:
    """Cancel a task without waiting for its end. Its result or error is discarded."""
    task.cancel()
    _cancelled.add(task)
    task.add_done_callback(_end_cancelled)


def bound_end(code: int) -> None:
    """End this process with `code` after the grace of its last run, unless it ends by itself before."""
    threading.Thread(target=_end_late, args=(code, _grace_s, _waited), daemon=True, name="end").start()


# Private


def _end_cancelled(task: asyncio.Future[Any]) -> None:
    _cancelled.discard(task)
    _ = task.cancelled() or task.exception()  # read it, so that asyncio does not warn


def _complete(run: Callable[[], Result], task: asyncio.Task[Any]) -> Result:
    """Return what `run` returns. A task that exits stops the event loop, which then runs again until `task` is done."""
    reported: set[str] = set()
    while True:
        try:
            return run()
        except SystemExit as error:
            if task.done():
                raise
            if (why := explained(error)) not in reported:
                reported.add(why)
                terminal.warning(f"an asyncio task of user code ended by {why}: the task failed, and the run continues")


async def _end_others(
    work: asyncio.Task[Any], executor: ThreadPoolExecutor, grace_s: float, error: BaseException | None
) -> None:
    """Wait until all tasks of this loop and all threads of `executor` have ended, or the time is up."""
    await asyncio.wait([work])  # a Ctrl-C may have cut it off: its end has limits of its own
    generators = asyncio.ensure_future(asyncio.get_running_loop().shutdown_asyncgens())
    began, quiet = time.monotonic(), True
    while True:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        threads = [thread for thread in executor._threads if thread.is_alive()]
        seconds = time.monotonic() - began
        if not tasks and not threads:
            return
        if seconds >= grace_s:
            generators.cancel()
            terminal.warning(
                f"{_named(tasks, threads)} did not end within {grace_s:g} s (watchdog.grace_s): left behind"
            )
            return
        if seconds >= _QUIET_S and quiet:
            quiet = False
            how = "is over" if error is None else f"has failed ({explained(error)})"
            terminal.warning(
                f"the run {how}. It waits for cancelled tasks, {grace_s:g} s at most: {_named(tasks, threads)}"
            )
        await (asyncio.wait(tasks, timeout=_LOOK_S) if tasks else asyncio.sleep(_LOOK_S))


def _end_late(code: int, grace_s: float, waited: bool) -> None:
    """In a daemon thread: it ends with the process, if that ends by itself."""
    time.sleep(quiet_s := min(_QUIET_S, grace_s))
    if not waited:
        if threads := _hanging_threads():
            terminal.warning(f"the process waits for what goes on, {grace_s:g} s at most: {_named((), threads)}")
        time.sleep(grace_s - quiet_s)
    if not (threads := _hanging_threads()):
        return  # the interpreter is ending
    terminal.warning(
        f"{_named((), threads)} did not end within {grace_s:g} s (watchdog.grace_s): the process ends all the same"
    )
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
        frames = traceback.extract_stack(sys._current_frames().get(thread.ident or 0))
        place = place_of_user((frame.filename, frame.lineno or 0) for frame in frames)
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
