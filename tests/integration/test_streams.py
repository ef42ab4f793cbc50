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


def recipe(folder: Path) -> Path:
    file = runs.write(folder, steps=2)
    (folder / "reward.py").write_text(PRINTS)
    return file


def trained(folder: Path, **streams: int) -> runs.Run:
    run = runs.Run(["train", str(recipe(folder))], **streams)
    assert run.wait(600) == 0, run.err
    check(folder)
    return run


def check(folder: Path) -> None:
    assert len(runs.json_lines(folder / "run" / "metrics.jsonl")) == 2
    assert (folder / "run" / "model" / "config.json").exists() and (folder / "run" / "finished").exists()
    assert all(row["reward/missing"] == 0 for row in runs.json_lines(folder / "run" / "metrics.jsonl"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize(("broken", "why"), [(full, "No space left on device"), (without_reader, "Broken pipe")])
def test_run_with_a_broken_stdout_is_reported(tmp_path: Path, broken: Callable[[], int], why: str) -> None:
    said = trained(tmp_path, stdout=broken()).err
    assert "notice: standard output could not be written: " + why in said
    assert "Loading weights" not in said and "Writing model" not in said  # bars of transformers


def test_run_with_a_broken_stderr_is_reported(tmp_path: Path) -> None:
    assert "step 2/2" in trained(tmp_path, stderr=without_reader()).out


def test_run_with_closed_streams_trains(tmp_path: Path) -> None:
    """Closed before the interpreter starts, which a fork cannot be."""
    done = subprocess.run(
        runs.command("train", recipe(tmp_path)),
        env=runs.environment(),
        preexec_fn=lambda: [os.close(number) for number in (0, 1, 2)],
    )
    assert done.returncode == 0
    check(tmp_path)
