"""First module in the process of a workflow.command program: sets limits and execs the program (command.py)."""

from __future__ import annotations

import os
import signal
import sys

from rollover.processes import limit_memory


def main(python_path: str, memory_bytes: str, *command: str) -> None:
    """Replace this process by `command`. `python_path`: the user's PYTHONPATH."""
    limit_memory(int(memory_bytes))
    os.environ.pop("PYTHONPATH", None)
    if python_path:
        os.environ["PYTHONPATH"] = python_path
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; other programs rely on their default
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
