"""The logger `rollover` and its handler, which prints what is logged.

    logging.getLogger(__name__) ──▶ while a run is open: its trackers, whose live view prints the message on stdout
                                └─▶ otherwise: stderr
    terminal                    ──▶ stderr, with `rollover: notice: `, `rollover: ` or `rollover: error: `

Modules log by `logging.getLogger(__name__)`. A program adds handlers of its own to `logging.getLogger("rollover")`. The
logger does not propagate: a handler of the root logger would print each message a second time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO, Literal, get_args

from rollover.text import printable_lines

LogFormat = Literal["text", "json"]
FORMATS = get_args(LogFormat)
_VARIABLE = "ROLLOVER_LOG_FORMAT"  # child processes inherit it

Listener = Callable[[str], None]
terminal = logging.getLogger("rollover.terminal")
"""Messages about the command or the call itself: never part of a run's view."""
_PREFIXES = {logging.INFO: "rollover: notice: ", logging.WARNING: "rollover: ", logging.ERROR: "rollover: error: "}

_open_runs: list[Listener] = []  # the newest last
_own_run: ContextVar[Listener | None] = ContextVar("own_run", default=None)


@contextlib.contextmanager
def messages_to(listener: Listener) -> Iterator[None]:
    """Send messages to `listener` within the block: those of this context, and those of no open run's context."""
    _open_runs.append(listener)
    _own_run.set(listener)
    try:
        yield
    finally:
        _open_runs.remove(listener)
        _own_run.set(None)


def set_format(name: LogFormat) -> None:
    """Set the format of this process and of its future children."""
    os.environ[_VARIABLE] = name


def is_json() -> bool:
    """Return whether every message is printed as one JSON object on a line."""
    return os.environ.get(_VARIABLE) == "json"


def print_json(name: str, level: str, message: str, stream: IO[str]) -> None:
    """Print {"time", "level", "logger", "message"} as one line; the time is in UTC."""
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    values = {"time": time, "level": level, "logger": name, "message": message}
    _print(json.dumps(values), stream)


class _Handler(logging.Handler):
    def handle(self, record: logging.LogRecord) -> bool:
        """Emit without the lock: a listener may wait for a thread that logs, and a signal handler logs, too."""
        try:
            message = self.format(record)
        except Exception:  # arguments that do not fit their format
            self.handleError(record)
            return False
        self._emit(record, message)
        return True

    def _emit(self, record: logging.LogRecord, message: str) -> None:
        listener = None if record.name == terminal.name else _listener()
        if is_json():
            print_json(record.name, record.levelname, message, sys.stderr if listener is None else sys.stdout)
        elif listener is None:
            prefix = _PREFIXES.get(record.levelno, "") if record.name == terminal.name else ""
            _print(printable_lines(prefix + message), sys.stderr)
        if listener is not None:
            listener(message)


def _listener() -> Listener | None:
    own = _own_run.get()
    return own if own in _open_runs else _open_runs[-1] if _open_runs else None


def _print(line: str, stream: IO[str]) -> None:
    with contextlib.suppress(OSError, ValueError):  # no reader, a full disk, or a closed stream
        stream.write(line + "\n")  # whole: threads may print at the same time
        stream.flush()


_logger = logging.getLogger("rollover")
_logger.setLevel(logging.INFO)
_logger.propagate = False
_logger.addHandler(_Handler())
