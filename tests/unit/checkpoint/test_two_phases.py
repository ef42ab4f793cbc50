"""A checkpoint is begun, its files are added, and it is committed: readers see whole ones, whatever comes between."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from rollover.checkpoint.store import CheckpointStore, CheckpointWriteError
from rollover.checkpoint.writing import PendingCheckpoint

OLD, NEW = {"a": b"old", "folder/b": b"older"}, {"a": b"new", "folder/b": b"newer", "c": b"newest"}
STORES: dict[str, Callable[[Path], str]] = {
    "local": lambda folder: str(folder / "checkpoints"),
    "memory": lambda folder: f"memory://two-phases-{uuid.uuid4().hex}",
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(STORES[request.param](tmp_path), keep=2)
    store.write("step-000010", OLD)
    return store


def contents(store: CheckpointStore) -> dict[str, dict[str, bytes]]:
    """As another process reads it."""
    reader = CheckpointStore(store.dir, keep=2)
    return {name: {file: Path(path).read_bytes() for file, path in reader.open(name).items()} for name in reader.list()}


def added(pending: PendingCheckpoint) -> PendingCheckpoint:
    for file, content in NEW.items():
        pending.add(file, content)
    return pending


@pytest.mark.parametrize("name", ["step-000010", "step-000020"], ids=["replaced", "another"])
def test_until_it_is_committed_nobody_sees_it(store: CheckpointStore, name: str) -> None:
    pending = store.begin(name)
    assert contents(store) == {"step-000010": OLD}
    added(pending)
    assert contents(store) == {"step-000010": OLD}
    pending.commit()
    assert contents(store) == {"step-000010": OLD} | {name: NEW}


@pytest.mark.parametrize("name", ["step-000010", "step-000020"], ids=["replaced", "another"])
def test_what_was_begun_and_never_committed_is_gone_after_the_next(store: CheckpointStore, name: str) -> None:
    added(store.begin(name))  # the process dies here
    later = CheckpointStore(store.dir, keep=2)
    later.write("step-000030", NEW)
    assert contents(store) == {"step-000010": OLD, "step-000030": NEW}


def test_a_failing_file_takes_back_what_was_added(store: CheckpointStore) -> None:
    pending = added(store.begin("step-000020"))

    def fail(path: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointWriteError, match="step-000020 could not be written.*No space left"):
        pending.add("d", fail)
    assert contents(store) == {"step-000010": OLD}
    files = fsspec.core.url_to_fs(store.dir)[0].find(store.dir)
    assert not [file for file in files if "step-000020" in file], "what was added lies there still"


def test_names_that_would_leave_the_checkpoint_are_refused(store: CheckpointStore) -> None:
    for file in ("../a", "/a", "manifest.json", "COMMITTED", ""):
        with pytest.raises(AssertionError, match="bad file name"):
            store.begin("step-000020").add(file, b"")


KILLED_BETWEEN_ANY_TWO_WRITES = '''
"""An object store (a folder behind a file system of its own, without rename) whose writer is killed at every place."""
import os, shutil, signal, sys
import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem
from rollover.checkpoint.store import CheckpointStore

class Objects(AbstractFileSystem):
    """Every call that changes something is counted, and number `kill_at` is not made: the process dies instead."""
    protocol, cachable = "objects", False
    files, left, kill_at = LocalFileSystem(), 0, None

    def _change(self, name, *args, **kwargs):
        if Objects.kill_at is not None:
            if Objects.left == Objects.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            Objects.left += 1
        return getattr(self.files, name)(*args, **kwargs)

    @classmethod
    def _strip_protocol(cls, path): return path.removeprefix("objects://")
    def info(self, path, **kw): return self.files.info(path)
    def ls(self, path, detail=True, **kw): return self.files.ls(path, detail=detail)
    def cat_file(self, path, **kw): return self.files.cat_file(path)
    def get_file(self, source, target, **kw): return self.files.get_file(source, target)
    def makedirs(self, path, exist_ok=False): return self._change("makedirs", path, exist_ok=exist_ok)
    def pipe_file(self, path, value, **kw): return self._change("pipe_file", path, value)
    def rm_file(self, path): return self._change("rm_file", path)
    def put_file(self, source, target, **kw):
        # Uploaded in two halves, so that a kill also falls into the middle of a file.
        half = open(source, "rb").read()
        self._change("pipe_file", target, half[: len(half) // 2])
        return self._change("pipe_file", target, half)
    def rm(self, path, recursive=False):
        for file in self.files.find(path):
            self._change("rm_file", file)
        return self._change("rm", path, recursive=True)

fsspec.register_implementation("objects", Objects)
root = sys.argv[1]
start, work = f"{root}/start", f"{root}/work"
content = lambda letter: {f"{i}": letter * 100 for i in range(3)}
before = CheckpointStore(f"objects://{start}", keep=2)
before.write("step-000010", content(b"a"))
before.write("step-000020", content(b"b"))
places, seen = 0, set()
while True:
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(start, work)
    child = os.fork()
    if child == 0:
        Objects.left, Objects.kill_at = 0, places
        store = CheckpointStore(f"objects://{work}", keep=2)
        for name, letter in (("step-000020", b"c"), ("step-000030", b"d")):  # replaces one; deletes the oldest
            pending = store.begin(name)
            for file, value in content(letter).items():
                pending.add(file, value)
            pending.commit()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    store = CheckpointStore(f"objects://{work}", keep=2)
    names = store.list()
    assert "step-000020" in names and len(names) >= 2, (places, names)
    state = []
    for name in names:
        files = {file: open(path, "rb").read() for file, path in store.open(name).items()}
        assert files in [content(letter) for letter in (b"a", b"b", b"c", b"d")], (places, name, files)
        state.append((name, files["0"][:1]))
    seen.add(tuple(state))
    store.write("step-000040", content(b"e"))
    assert len(store.list()) == 2 and "step-000040" in store.list()
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    places += 1
print(places, len(seen))
'''


def test_sigkill_between_any_two_writes_to_an_object_store(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_BETWEEN_ANY_TWO_WRITES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    places, states = map(int, done.stdout.split())
    # The four states: a b, a c (replaced), a c d (committed), c d (the oldest deleted).
    assert places > 30 and states == 4
