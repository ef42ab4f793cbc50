"""The process of a tool, which keeps the tool's imports, locks, waits and exit handlers out of the run.

    run ──tell──▶ Worker ──▶ child.py ──▶ tool
    run ◀──heard── replies ◀──┘

Never waits but in `wait`, and calls nobody: what the tool reports is kept in `heard`.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import deque
from typing import Any

from rollover.plugins.trackers.tool import redacted
from rollover.processes import child_environment
from rollover.workers.worker import Reply, Worker

MOST_UNDER_WAY = 256
"""Messages that the tool has not answered yet: what comes then is lost."""
_MOST_HEARD = 100
_LISTEN_LIMIT_S = 5.0
_LAST_CHARS = 300


class ToolProcess:
    """`name`: of the tool; `arguments`: for child.main."""

    def __init__(self, name: str, *arguments: object) -> None:
        self.name, self._arguments = name, arguments
        self.lost = 0  # messages
        self.failures = 0
        self.heard: deque[str] = deque(maxlen=_MOST_HEARD)  # lines for the user
        self.last_sign = time.monotonic()  # when it last took something, or had nothing to take
        self._gap = False
        self._gone, self._closing, self._missed = False, False, False
        self._said: set[str] = set()
        self._worker: Worker | None = None
        self._listener = threading.Thread(target=self._listen, name=f"{name}-listener", daemon=True)
        self._printed = b""  # the end of what it prints: the last line says why it ended

    @property
    def under_way(self) -> int:
        """Messages that the tool has not taken yet."""
        return 0 if self._worker is None or self._gone else self._worker.num_pending

    def start(self) -> None:
        """It dies with this process, and with it whatever it starts."""
        try:
            self._worker = Worker(
                self.name,
                "rollover.plugins.trackers.child",
                self.name,
                *self._arguments,
                kept=True,
                environment=child_environment(OMP_NUM_THREADS="1"),
                stderr=subprocess.PIPE,
                on_end=self._on_end,
            )
        except OSError as error:  # no memory for a process, say
            self._ended(f"its process cannot be started ({error})")
            return
        self._listener.start()

    def tell(self, message: dict[str, Any], *, always: bool = False) -> None:
        """Returns at once. Lost, and counted, where too much is under way, but if it must come `always`."""
        if self._gone or self._worker is None or (self.under_way >= MOST_UNDER_WAY and not always):
            self.lost += 1
            self._gap = True
            return
        if not self.under_way:
            self.last_sign = time.monotonic()
        self._worker.submit(message | {"gap": True} if self._gap else message, self._hear)
        self._gap = False

    def close(self, failed: bool) -> None:
        """Returns at once: the last message, after which its process may end."""
        self._closing = True
        self.tell({"close": failed}, always=True)

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended by itself, or does so within the limit."""
        return self._worker is None or self._worker.wait(limit_s)

    def kill(self) -> None:
        """End what is left of it, and return when it is gone."""
        self._gone = True
        if self._worker is not None:
            self._worker.close()

    # In threads of the Worker, and of the listener

    def _hear(self, reply: Reply) -> bool:
        if isinstance(reply, Exception):
            if not self._gone:
                self.lost += 1
                self._missed = True
            return True
        self.last_sign = time.monotonic()
        if "say" in reply:
            self.heard.append(reply["say"])
        elif "failed" in reply:
            self.failures += 1
            again = ", and it is tried again with the next step" if reply.get("again", True) else ""
            self._say(f"failed: {reply['failed']}; the run goes on{again}")
        return "done" in reply

    def _on_end(self, worker: Worker) -> None:
        if not self._gone and (self._missed or not self._closing):
            self._ended(f"its process ended{self._last_words()}")

    def _listen(self) -> None:
        assert self._worker is not None and self._worker.stderr is not None
        with self._worker.stderr as pipe:
            while piece := os.read(pipe.fileno(), 1 << 16):
                self._printed = (self._printed + piece)[-10 * _LAST_CHARS :]

    def _ended(self, why: str) -> None:
        self._gone = True
        self.failures += 1
        self._say(f"{why}; the run goes on without it")

    def _say(self, what: str) -> None:
        """Each thing once."""
        if what not in self._said and len(self._said) < _MOST_HEARD:
            self._said.add(what)
            self.heard.append(f"track.trackers: {self.name} {what} (trackers/failed counts; this is said once)")

    def _last_words(self) -> str:
        """The end of what it printed."""
        self._listener.join(_LISTEN_LIMIT_S)
        lines = self._printed.decode("utf-8", "replace").strip().splitlines()
        return f" ({redacted(lines[-1])[:_LAST_CHARS]})" if lines else ""
