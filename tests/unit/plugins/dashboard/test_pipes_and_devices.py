"""Pipes, devices and endless files in a run's directory: every reader answers, within seconds and little memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recorded_run import write_run
from rollover.config import Config
from rollover.config.run import RunConfig
from rollover.files import MOST_LINE_BYTES, lines_of, open_regular, read_regular
from rollover.run.directory import RunDirectory

LIMIT_S, LIMIT_MB = 60, 2500  # of address space, so that a gigabyte of zeros does not fit twice
FILES = (
    "config.resolved.json", "metrics.jsonl", "eval.jsonl", "trace.jsonl", "finished", "resume.json", "lock",
    "tokenizer.json", "rollouts/step-000001.jsonl", "evaluations/step-000001.jsonl",
)  # fmt: skip


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/full")


def endless(path: Path) -> None:
    """A sparse file: a gigabyte of zeros, which is one line."""
    with open(path, "wb") as file:
        file.truncate(1 << 30)


READ = """
import sys
from contextlib import suppress
from rollover.cli import main
from rollover.plugins.dashboard.run_data import RunData
for run in sys.argv[1:]:
    print("reading", run, flush=True)
    for words in (["show", run, "--rollouts"], ["show", run, "--json"], ["trace", run],
                  ["report", run, "-o", run + ".html"]):
        assert main(words) in (0, 2), words
    with suppress(ValueError):
        data = RunData(run)
        of_one = {"rollout": {"step": "1", "id": "3-0"}, "episode": {"step": "1", "id": "3-0"}}
        for name in data.queries:
            with suppress(ValueError, KeyError):
                data.answer(name, of_one.get(name, {}))
        data.state()
        data.read_ahead()
"""


def hostile(run: Path, name: str, damage: Callable[[Path], None]) -> None:
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    damage(path)


@pytest.mark.parametrize("damage", [pipe, device, endless])
def test_readers_answer_for_hostile_files(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    runs = []
    for number, name in enumerate(FILES):
        runs.append(tmp_path / f"{number}-{name.replace('/', '-')}")
        runs[-1].mkdir()
        hostile(write_run(runs[-1]), name, damage)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_MB << 20, LIMIT_MB << 20))

    command = [sys.executable, "-c", READ, *map(str, runs)]
    with open(tmp_path / "said", "w") as said:
        done = subprocess.run(command, stdout=said, stderr=said, timeout=LIMIT_S, preexec_fn=limit)
    text = (tmp_path / "said").read_text()
    assert done.returncode == 0 and "MemoryError" not in text, text[-2000:]


@pytest.mark.parametrize("damage", [pipe, device])
@pytest.mark.parametrize("name", ["metrics.jsonl", "lock", "finished", "resume.json", "trace.jsonl"])
def test_train_refuses_hostile_file(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    hostile(write_run(tmp_path), name, damage)
    with pytest.raises(ValueError, match=f"{name} in it is a folder, a device or a pipe"):
        RunDirectory(Config(run=RunConfig(dir=str(tmp_path))), resume=True)


def test_open_regular_takes_files_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one\ntwo")
    os.mkfifo(tmp_path / "pipe")
    with open_regular(tmp_path / "file") as file:
        assert list(lines_of(file, "file")) == [b"one\n", b"two"]
    for name in ("pipe", "", "/dev/zero"):
        with pytest.raises(ValueError, match="no file, but a folder, a device or a pipe"):
            open_regular(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")
    assert read_regular(tmp_path / "file", 7) == b"one\ntwo"
    with pytest.raises(ValueError, match="more than 6 bytes"):
        read_regular(tmp_path / "file", 6)
    with open_regular(tmp_path / "file") as file, pytest.raises(ValueError, match="a line of more than 3 bytes"):
        list(lines_of(file, "file", 3))
    assert MOST_LINE_BYTES > 10**8
