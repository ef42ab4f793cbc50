"""A disk that is full, at whichever call it is noticed: an error that says so, and the checkpoints are as before."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollover.checkpoint.store import CheckpointStore, CheckpointWriteError

BEFORE = {"step-000010": b"ten", "step-000020": b"twenty"}
FILES = {"a": b"new", "folder/b": b"newer"}


class FullDisk:
    """Call number `at` of those that need room on the disk fails; `calls` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.at, self.calls = at, 0
        for name in ("mkdir", "makedirs", "rename", "fsync"):
            monkeypatch.setattr(os, name, self.failing(getattr(os, name)))
        monkeypatch.setattr(Path, "write_bytes", self.failing(Path.write_bytes))

    def failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.at + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **kwargs)

        return wrapped


def contents(store: CheckpointStore) -> dict[str, dict[str, bytes]]:
    return {name: {file: Path(path).read_bytes() for file, path in store.open(name).items()} for name in store.list()}


@pytest.mark.parametrize("name", ["step-000030", "step-000020"], ids=["a new one", "a replacement"])
def test_every_call_may_be_the_one_that_fails(tmp_path: Path, name: str) -> None:
    num_failed = 0
    for at in range(100):
        folder = tmp_path / str(at)
        store = CheckpointStore(str(folder), keep=3)
        for step, content in BEFORE.items():
            store.write(step, {"a": content})
        before = contents(store)
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = FullDisk(monkeypatch, at)
            try:
                store.write(name, FILES)
                failed = False
            except CheckpointWriteError as error:
                failed = True
                assert f"checkpoint {name} could not be written" in str(error) and "No space left" in str(error)
        if failed:
            num_failed += 1
            # Where only the folder's own sync failed, the new checkpoint is there, and complete.
            assert contents(store) in (before, before | {name: FILES}), f"call {at}"
            assert before.keys() <= set(os.listdir(folder)), f"call {at}: one is missing under its own name"
            assert not [entry for entry in os.listdir(folder) if entry.startswith(".tmp")], f"call {at}"
            store.write(name, FILES)
        assert contents(store) == before | {name: FILES}
        assert sorted(os.listdir(folder)) == sorted(before | {name: FILES}), "nothing else is left lying there"
        if disk.calls <= at:
            assert not failed
            break
    else:
        pytest.fail("a write has fewer calls than that")
    assert num_failed >= 10


def test_a_disk_without_room_for_the_directory(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "not" / "there"), keep=1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        FullDisk(monkeypatch, 0)
        with pytest.raises(CheckpointWriteError, match="step-000010 could not be written.*No space left"):
            store.write("step-000010", FILES)
    assert store.list() == [] and not (tmp_path / "not").exists()
