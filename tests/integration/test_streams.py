"""A run whose stdout or stderr cannot be written trains, saves, and exits as any other."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import runs

PRINTS = """
import sys

def reward(completions, **columns):
    print("scored", flush=True)
    print("scored", file=sys.stderr, flush=True)
    return [sum(c.isdigit() for c in text) / 48 for text in completions]
"""


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def without_reader() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def trained(folder: Path, stdout: int, stderr: int, closed: tuple[int, ...] = ()) -> subprocess.CompletedProcess[bytes]:
    recipe = runs.write(folder, steps=2)
    (folder / "reward.py").write_text(PRINTS)
    done = subprocess.run(
        runs.command("train", recipe),
        stdout=stdout,
        stderr=stderr,
        env=runs.environment(),
        preexec_fn=lambda: [os.close(number) for number in closed],
    )
    assert done.returncode == 0, done
    assert len(runs.json_lines(folder / "run" / "metrics.jsonl")) == 2
    assert (folder / "run" / "model" / "config.json").exists() and (folder / "run" / "finished").exists()
    assert all(row["reward/missing"] == 0 for row in runs.json_lines(folder / "run" / "metrics.jsonl"))
    return done


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize(("broken", "why"), [(full, b"No space left on device"), (without_reader, b"Broken pipe")])
def test_run_with_a_broken_stdout_is_reported(tmp_path: Path, broken: Callable[[], int], why: bytes) -> None:
    done = trained(tmp_path, broken(), subprocess.PIPE)
    assert b"notice: standard output could not be written: " + why in done.stderr
    assert b"Loading weights" not in done.stderr and b"Writing model" not in done.stderr  # bars of transformers


def test_run_with_a_broken_stderr_is_reported(tmp_path: Path) -> None:
    done = trained(tmp_path, subprocess.PIPE, without_reader())
    assert b"step 2/2" in done.stdout


def test_run_with_closed_streams_trains(tmp_path: Path) -> None:
    trained(tmp_path, subprocess.DEVNULL, subprocess.DEVNULL, closed=(0, 1, 2))
