"""Programs in a process of their own, as text: what forks, or dies, must not be the process of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_PATH = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]


def output_of(program: str, *words: str | Path, timeout: float = 600) -> str:
    """What it prints. It may import what is in tests/; an assertion that fails there fails here."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(_PATH)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
