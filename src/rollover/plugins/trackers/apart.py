"""A tool in a process of its own, so that nothing it does costs the run anything: neither its imports, nor a lock that
it holds, nor a server that never answers, nor what it does when a process exits.

    run ──tell──▶ queue (bounded) ──thread──▶ pipe ──▶ child.py ──▶ tool
                                      heard ◀──thread── pipe ◀──┘

Owns the process, what is under way to it, and what was lost. Never waits but in `wait`, and calls nobody: what the tool
has to say is kept in `heard` until it is asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from typing import Any

from rollover.plugins.trackers.tool import redacted
from rollover.processes import child_command, child_environment

MOST_UNDER_WAY = 256
"""Messages that the tool has not answered yet: what comes then is lost."""
_MOST_HEARD = 100
_KILL_LIMIT_S = 5.0
_LAST_CHARS = 300


class Apart:
    """`name`: of the tool; `arguments`: for child.main."""

    def __init__(self, name: str, *arguments: object) -> None:
        self.name, self._arguments = name, arguments
        self.lost = 0  # messages
        self.failures = 0
        self.heard: deque[str] = deque(maxlen=_MOST_HEARD)  # lines for the user
        self.last_sign = time.monotonic()  # when it last took something, or had nothing to take
        self._told, self._done = 0, 0
        self._gap = False
        self._gone, self._closing = False, False
        self._said: set[str] = set()
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._listener = threading.Thread(target=self._listen, name=f"{name}-listener", daemon=True)
        self._printed = b""  # the end of what it prints: the last line says why it ended

    @property
    def under_way(self) -> int:
        """Messages that the tool has not taken yet."""
        return self._told - self._done

    def start(self) -> None:
        """It dies with this process, and with it whatever it starts."""
        try:
            self._process = subprocess.Popen(
                child_command("rollover.plugins.trackers.child", self.name, *self._arguments, kept=True),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=child_environment(OMP_NUM_THREADS="1"),
                process_group=0,  # Ctrl-C is for the run
            )
        except OSError as error:  # no memory for a process, say
            self._ended(f"its process cannot be started ({error})")
            return
        threading.Thread(target=self._write, name=f"{self.name}-writer", daemon=True).start()
        self._reader.start()
        self._listener.start()

    def tell(self, message: dict[str, Any], *, always: bool = False) -> None:
        """Returns at once. Lost, and counted, where too much is under way, but if it must come `always`."""
        if self._gone or (self.under_way >= MOST_UNDER_WAY and not always):
            self.lost += 1
            self._gap = True
            return
        if not self.under_way:
            self.last_sign = time.monotonic()
        self._told += 1
        self._queue.put(message | {"gap": True} if self._gap else message)
        self._gap = False

    def close(self, failed: bool) -> None:
        """Returns at once: the last message, after which its process may end."""
        self._closing = True
        self.tell({"close": failed}, always=True)

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended by itself, or does so within the limit."""
        if self._process is None:
            return True
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(_KILL_LIMIT_S)  # what it answered last
        return True

    def kill(self) -> None:
        """End what is left of it, and return when it is gone."""
        process, self._gone = self._process, True
        self._queue.put(None)
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.terminate()  # its keeper ends it, and all that it started
        try:
            process.wait(_KILL_LIMIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # In threads of their own

    def _write(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:  # it ended: the other thread says so
            while (message := self._queue.get()) is not None:
                pipe.write(json.dumps(message).encode() + b"\n")
                pipe.flush()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
                if isinstance(answer, dict):  # a library may print what it likes
                    self._hear(answer)
        if not self._gone and (self.under_way or not self._closing):
            self.lost += self.under_way
            self._ended(f"its process ended{self._last_words()}")
        self._queue.put(None)

    def _listen(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        with self._process.stderr as pipe:
            while piece := os.read(pipe.fileno(), 1 << 16):
                self._printed = (self._printed + piece)[-10 * _LAST_CHARS :]

    def _ended(self, why: str) -> None:
        self._gone = True
        self.failures += 1
        self._say(f"{why}; the run goes on without it")

    def _hear(self, answer: dict[str, Any]) -> None:
        self.last_sign = time.monotonic()
        if "done" in answer:
            self._done += 1
        elif "say" in answer:
            self.heard.append(answer["say"])
        elif "failed" in answer:
            self.failures += 1
            again = ", and it is tried again with the next step" if answer.get("again", True) else ""
            self._say(f"failed: {answer['failed']}; the run goes on{again}")

    def _say(self, what: str) -> None:
        """Each thing once."""
        if what not in self._said and len(self._said) < _MOST_HEARD:
            self._said.add(what)
            self.heard.append(f"track.trackers: {self.name} {what} (trackers/failed counts; this is said once)")

    def _last_words(self) -> str:
        """The end of what it printed."""
        self._listener.join(_KILL_LIMIT_S)
        lines = self._printed.decode("utf-8", "replace").strip().splitlines()
        return f" ({redacted(lines[-1])[:_LAST_CHARS]})" if lines else ""
