"""The parent's end of one child process that answers calls.

    submit ──▶ queue ──writer thread──▶ socket ──▶ child ──▶ replies ──▶ supervisor thread ──▶ on_reply

The child and, with `kept`, all its descendants die with this process (processes.py). The supervisor thread detects its
end, kills it if it was stopped for too long, and bounds its log. No call blocks: event loops and threads may submit. A
Worker is one process: create a new one to restart it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rollover.process_tree import is_stopped
from rollover.processes import child_command, child_environment
from rollover.workers.framing import MAX_BYTES, BadMessage, Channel, encode

_POLL_S = 0.2
_LOG_EVERY_S = 10.0
_EXIT_LIMIT_S = 5.0
_GRACE_S = 0.05
_MOST_LOG_BYTES = 8 << 20
_LAST_LINES = 5
_STARTED = "--- started "


class WorkerDied(Exception):
    """The process ended while a reply was due."""


Reply = dict[str, Any] | WorkerDied | BadMessage


@dataclass(frozen=True)
class WorkerLimits:
    """message_bytes: of one message. stopped_s: kill it after it was stopped (SIGSTOP) for so long; a kept one is
    killed after some seconds in any case.
    """

    message_bytes: int = MAX_BYTES
    stopped_s: float | None = None


class Worker:
    """A child process that runs `main(*arguments)` of `module`, and reads its calls by `Calls` (child.py).

    name: for messages ("the reward worker"). kept: it runs foreign code; it and all its descendants are killed
    together. environment: `child_environment()` unless given. stderr: for its output, instead of this process's; a
    LogFile is bounded in size. files: descriptors that it inherits. on_end: called with the Worker in its supervisor
    thread.

    Start it in a thread that outlives it: on Linux a child dies with the thread that started it. Raises OSError if the
    process cannot be started.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *arguments: object,
        kept: bool = False,
        environment: Mapping[str, str] | None = None,
        stderr: LogFile | int | None = None,
        limits: WorkerLimits = WorkerLimits(),
        files: Sequence[int] = (),
        on_end: Callable[[Worker], None] = lambda worker: None,
    ) -> None:
        self.name, self._kept, self._on_end, self._stopped_limit_s = name, kept, on_end, limits.stopped_s
        self._log = stderr if isinstance(stderr, LogFile) else None
        ours, theirs = socket.socketpair()
        opened = stderr.open() if isinstance(stderr, LogFile) else contextlib.nullcontext(stderr)
        with opened as output, theirs:
            try:
                self._process = subprocess.Popen(
                    child_command(module, *arguments, kept=kept),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,  # until `Calls` redirects it to stderr
                    stderr=output,
                    env=child_environment() if environment is None else environment,
                    pass_fds=files,
                    # Ctrl-C is for the loop. A kept one gets no own session: Linux shares the cores between sessions
                    # first, and each would weigh as much as the trainer.
                    process_group=0 if kept else None,
                    start_new_session=not kept,
                )
            except BaseException:
                ours.close()
                raise
        self._channel = Channel(ours, limits.message_bytes)
        self._unsent: queue.SimpleQueue[list[bytes | memoryview] | None] = queue.SimpleQueue()
        self._pending: dict[int, Callable[[Reply], bool]] = {}
        self._lock = threading.Lock()  # of the pending calls
        self._num_calls = 0
        self._over: Reply | None = None  # set when no more reply can come
        self._ended = threading.Event()
        self._when_ended: list[Callable[[], object]] = []
        self.stopped_s = 0.0
        """Seconds for which it has been stopped (SIGSTOP); measured with `limits.stopped_s` only."""
        self.last_reply = time.monotonic()
        """When it last replied, or was started (time.monotonic)."""
        self.pid = self._process.pid
        """Id of the process; with `kept`, of its supervisor process."""
        try:
            self._writer = threading.Thread(target=self._write, daemon=True, name=f"{name} writer")
            self._writer.start()
            threading.Thread(target=self._supervise, daemon=True, name=f"{name} supervisor").start()
        except RuntimeError as error:  # no thread can be started
            self._process.kill()
            ours.close()
            raise OSError(str(error)) from error

    @property
    def stderr(self) -> IO[bytes] | None:
        """Return its output, with stderr = subprocess.PIPE."""
        return self._process.stderr

    @property
    def alive(self) -> bool:
        """Return whether it may still reply."""
        return self._over is None and self._process.returncode is None

    @property
    def exit_code(self) -> int:
        """Return its exit code, or minus the number of a signal. Only after `wait` is True."""
        assert self._process.returncode is not None
        return self._process.returncode

    @property
    def num_pending(self) -> int:
        """Return the number of calls that are not done."""
        return len(self._pending)

    def submit(self, message: Mapping[str, Any], on_reply: Callable[[Reply], bool]) -> int:
        """Send a call, and return its number.

        `on_reply` gets each reply, in the supervisor thread, until it returns True; when the process has ended, it gets
        WorkerDied or BadMessage last. Raises TypeError for a message that cannot be sent.
        """
        with self._lock:
            number = self._num_calls + 1
            buffers = encode({**message, "call": number})
            self._num_calls = number
            over = self._over
            if over is None:
                self._pending[number] = on_reply
                self._unsent.put(buffers)
        if over is not None:
            on_reply(over)
        return number

    def notify(self, message: Mapping[str, Any]) -> None:
        """Send a message without a reply. Raises TypeError for one that cannot be sent."""
        self._unsent.put(encode(message))

    async def request(
        self,
        message: Mapping[str, Any],
        take: Callable[[dict[str, Any]], bool] = lambda reply: True,
        limit_s: float | None = None,
        *,
        limit_each: bool = False,
    ) -> dict[str, Any]:
        """Send a call, and return the first reply for which `take` returns True.

        Raises TimeoutError after `limit_s` (with `limit_each`, after that time without a reply), WorkerDied,
        BadMessage. Further replies are ignored after an error or a cancellation.
        """
        loop = asyncio.get_running_loop()
        replies: asyncio.Queue[Reply] = asyncio.Queue()

        def on_reply(reply: Reply) -> bool:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(replies.put_nowait, reply)
            return False

        begun = time.monotonic()
        number = self.submit(message, on_reply)
        is_done = False
        try:
            while True:
                left_s = None if limit_s is None else begun + limit_s - time.monotonic()
                try:
                    async with asyncio.timeout(left_s):
                        reply = await replies.get()
                except TimeoutError:
                    # A training step may block the event loop for longer than the limit: check for a reply once more.
                    await asyncio.sleep(_GRACE_S)
                    if replies.empty():
                        raise
                    reply = replies.get_nowait()
                if isinstance(reply, Exception):
                    raise reply
                if take(reply):
                    is_done = True
                    return reply
                if limit_each:
                    begun = time.monotonic()
        finally:
            with self._lock:
                if is_done:
                    self._pending.pop(number, None)
                elif number in self._pending:  # cancelled, or too late: ignore replies
                    self._pending[number] = lambda reply: False

    def wait(self, limit_s: float | None = None) -> bool:
        """Return whether it has ended, and its last reply was delivered, within the limit."""
        return self._ended.wait(limit_s)

    def kill(self) -> None:
        """Kill it, with all its descendants if it is kept. Returns at once; `wait` waits for the end."""
        with contextlib.suppress(ProcessLookupError):
            # The supervisor process of a kept one kills its child, with all descendants, and ends.
            self._process.terminate() if self._kept else self._process.kill()
        self._channel.shut()

    async def killed(self) -> None:
        """Kill it, and wait for its end."""
        self.kill()
        await self.ended()

    async def ended(self) -> None:
        """Wait until it has ended, and its last reply was delivered."""
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            if self._ended.is_set():
                return
            self._when_ended.append(lambda: loop.call_soon_threadsafe(gone.set))
        await gone.wait()

    def disconnect(self) -> None:
        """End the connection, which ends the child's main function."""
        self._channel.shut()

    def close(self, grace_s: float = 0.0) -> None:
        """Disconnect, and kill the process if it still runs after `grace_s`."""
        self.disconnect()
        if not self._ended.wait(grace_s):
            self.kill()
            self._ended.wait()

    # In their own threads

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # it ended: the supervisor thread handles it
            while (buffers := self._unsent.get()) is not None:
                self._channel.send(buffers)

    def _supervise(self) -> None:
        bad = None
        log_at = time.monotonic() + _LOG_EVERY_S
        try:
            while True:
                if self._channel.wait(_POLL_S):
                    self._dispatch(self._channel.receive())
                elif self._process.poll() is not None:
                    break  # a forked process has the connection open
                else:
                    self._end_stopped()
                if self._log is not None and time.monotonic() > log_at:
                    self._log.bound()
                    log_at = time.monotonic() + _LOG_EVERY_S
        except BadMessage as error:
            bad = error
        except OSError:
            pass
        except Exception as error:  # of a callback: pending calls must not wait for ever
            bad = BadMessage(f"sent a reply that was not understood ({type(error).__name__}: {error})")
        how = self._end(bad is not None)
        with self._lock:
            self._over = bad or WorkerDied(f"{self.name} died in this call ({how})")
            pending, self._pending = self._pending, {}
        self._unsent.put(None)
        self._channel.shut()
        self._writer.join()
        self._channel.close()
        try:
            for on_reply in pending.values():
                on_reply(self._over)
            self._on_end(self)
        finally:
            with self._lock:
                self._ended.set()
            for call in self._when_ended:
                with contextlib.suppress(RuntimeError):  # its event loop is closed
                    call()

    def _dispatch(self, message: dict[str, Any]) -> None:
        number = message.pop("call", None)
        if not isinstance(number, int) or not 0 < number <= self._num_calls:
            raise BadMessage("answered no call" if isinstance(number, int) else "sent an invalid message")
        self.last_reply = time.monotonic()
        on_reply = self._pending.get(number)
        if on_reply is None:
            raise BadMessage("answered another call")
        if on_reply(message):
            self._pending.pop(number, None)

    def _end_stopped(self) -> None:
        if self._stopped_limit_s is None:
            return
        # Counted in polls: time in which this process was stopped, too, counts once.
        self.stopped_s = self.stopped_s + _POLL_S if is_stopped(self._process.pid) else 0.0
        if self.stopped_s >= self._stopped_limit_s:
            self._process.kill()

    def _end(self, at_once: bool) -> str:
        """Wait for its end, kill it if it does not end, and return how it ended."""
        if at_once:
            self.kill()
        closed = False
        try:
            self._process.wait(_EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            closed = True
            self._process.kill()
            if self._kept:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return how_it_ended(None if closed else self._process.returncode)


def how_it_ended(code: int | None) -> str:
    """Describe an exit code; None: the process did not end by itself."""
    if code is None:
        return "it closed its pipe"
    if code >= 0:
        return f"exit code {code}"
    known = {s.value: s.name for s in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"


class LogFile:
    """Log file `path` of a child process's output, appended to at each start.

    Above `most_bytes` it is moved to `<path>.1`, and starts empty.
    """

    def __init__(self, path: Path, most_bytes: int = _MOST_LOG_BYTES) -> None:
        self.path, self._most_bytes = path, most_bytes

    def open(self) -> IO[bytes]:
        """Open the file for a process that starts now."""
        self.bound()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab")
        file.write(f"{_STARTED}{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        file.flush()
        return file

    def bound(self) -> None:
        """Bound the size. Call it at intervals while a process writes; output of that moment may be lost."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_size > self._most_bytes:
                shutil.copyfile(self.path, self.path.with_name(self.path.name + ".1"))
                with self.path.open("r+b") as file:  # truncated, not replaced: the process has it open
                    file.truncate(0)

    def last_words(self) -> str:
        """Return the last lines since the last start; "" if there are none."""
        text = ""
        with contextlib.suppress(OSError):
            with self.path.open("rb") as file:
                file.seek(max(0, self.path.stat().st_size - 2**16))
                text = file.read().decode(errors="replace")
        lines = text.rpartition(_STARTED)[2].splitlines()
        return "\n".join((lines[1:] if _STARTED in text else lines)[-_LAST_LINES:])
