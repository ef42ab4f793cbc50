"""What runs first in the process of a program of workflow.command: it becomes the program (workflows/command.py)."""

from __future__ import annotations

import os
import signal
import sys

from rollover.processes import limit_memory


def main(python_path: str, memory_bytes: str, *command: str) -> None:
    """Run `command` in the place of this process. `python_path`: PYTHONPATH as it is without our own start."""
    limit_memory(int(memory_bytes))
    os.environ.pop("PYTHONPATH", None)
    if python_path:
        os.environ["PYTHONPATH"] = python_path
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and programs count on
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
