"""A checkpoint is begun, its files are added, and it is committed: readers see whole ones, whatever comes between."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from rollover.checkpoint.store import CheckpointStore, CheckpointWriteError
from scripted import output_of

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


@pytest.mark.parametrize("name", ["step-000010", "step-000020"], ids=["replaced", "another"])
def test_until_it_is_committed_nobody_sees_it(store: CheckpointStore, name: str) -> None:
    seen = []

    def looked_at(content: bytes) -> Callable[[str], None]:
        def write(path: str) -> None:
            seen.append(contents(store))
            Path(path).write_bytes(content)

        return write

    store.write(name, {file: looked_at(content) for file, content in NEW.items()})
    assert seen == [{"step-000010": OLD}] * len(NEW)
    assert contents(store) == {"step-000010": OLD} | {name: NEW}


def folder_of(files: dict[str, bytes]) -> Callable[[str], None]:
    def write(folder: str) -> None:
        assert os.listdir(folder) == [], "it is empty"
        for file, content in files.items():
            path = Path(folder, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    return write


def test_files_of_other_processes_are_in_the_checkpoint(store: CheckpointStore) -> None:
    slices = {"a": b"first", "deep/er/b": b"second", "deep/c": b""}
    store.write("step-000020", NEW, [("left-", folder_of(slices)), ("right/", folder_of({"a": b"third"}))])
    added = {f"left-{file}": content for file, content in slices.items()} | {"right/a": b"third"}
    assert contents(store) == {"step-000010": OLD, "step-000020": NEW | added}
    lying = fsspec.core.url_to_fs(store.dir)[0].find(store.dir)
    assert len([file for file in lying if "step-000020" in file]) == len(NEW | added) + 2, "and no other file is there"


@pytest.mark.parametrize(
    ("place", "error", "raised"),
    [
        ("file", OSError(28, "No space left on device"), CheckpointWriteError),
        ("folder", OSError(28, "No space left on device (rank 3)"), CheckpointWriteError),
        ("folder", RuntimeError("a rank is gone"), RuntimeError),  # not of the disk: it is passed on
    ],
)
def test_failing_part_takes_back_what_was_added(
    store: CheckpointStore, place: str, error: Exception, raised: type[Exception]
) -> None:
    def fail(path: str) -> None:
        if place == "folder":
            folder_of({"a": b"first"})(path)
        raise error

    parts = ({**NEW, "d": fail}, []) if place == "file" else (NEW, [("left-", fail)])
    with pytest.raises(raised, match="step-000020 could not be written.*No space left|^a rank is gone$"):
        store.write("step-000020", *parts)
    assert contents(store) == {"step-000010": OLD}
    files = fsspec.core.url_to_fs(store.dir)[0].find(store.dir)
    assert not [file for file in files if "step-000020" in file], "what was added lies there still"


def test_remote_store_stages_files_in_shared_folder(tmp_path: Path) -> None:
    shared, seen = tmp_path / "seen" / "by all", []

    def write(folder: str) -> None:
        seen.append(folder)
        folder_of({"a": b"first"})(folder)

    store = CheckpointStore(STORES["memory"](tmp_path), keep=2, shared=shared)
    store.write("step-000010", {}, [("", write)])
    paths = store.open("step-000010")
    assert all(shared in Path(path).parents for path in [*seen, *paths.values()])
    assert not Path(seen[0]).exists() and Path(paths["a"]).read_bytes() == b"first"


def test_names_that_would_leave_the_checkpoint_are_refused(store: CheckpointStore) -> None:
    for file in ("../a", "/a", "manifest.json", "COMMITTED", ""):
        with pytest.raises(AssertionError, match="bad file name"):
            store.write("step-000020", {file: b""})


KILLED_BETWEEN_ANY_TWO_WRITES = '''
"""One checkpoint is replaced, and another deletes the oldest, by a writer that is killed at every place."""
import os, shutil, signal, sys
from pathlib import Path
from dying_store import Objects
from rollover.checkpoint.store import CheckpointStore

kind, root = sys.argv[1:]
start, work = f"{root}/start", f"{root}/work"
opened = lambda folder: CheckpointStore(f"objects://{folder}" if kind == "objects" else folder, keep=2)
content = lambda letter: {f"{i}": letter * 100 for i in range(2)} | {"of/others": letter}
before = opened(start)

def write(store, name, letter):
    files = content(letter)
    of_others = files.pop("of/others")
    store.write(name, files, [("of/", lambda folder: Path(folder, "others").write_bytes(of_others))])

write(before, "step-000010", b"a")
write(before, "step-000020", b"b")

def kill_after(left):
    if kind == "objects":
        Objects.left = left

    def hook(event, args):  # comes before the call that it announces: so a kill falls between two changes of the disk
        nonlocal left
        if event != "os.kill" and event.startswith(("open", "os.", "shutil.")):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if kind == "local":
        sys.addaudithook(hook)

places, seen = 0, set()
while True:
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(start, work)
    child = os.fork()
    if child == 0:
        kill_after(places)
        store = opened(work)
        write(store, "step-000020", b"c")
        write(store, "step-000030", b"d")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    store = opened(work)
    names = store.list()
    assert "step-000020" in names and len(names) >= 2, (places, names)
    state = []
    for name in names:
        files = {file: Path(path).read_bytes() for file, path in store.open(name).items()}
        assert files in [content(letter) for letter in (b"a", b"b", b"c", b"d")], (places, name, files)
        state.append((name, files["0"][:1]))
    seen.add(tuple(state))
    write(store, "step-000040", b"e")
    assert len(store.list()) == 2 and "step-000040" in store.list()
    assert kind == "objects" or len(os.listdir(work)) == 2, (places, os.listdir(work))
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    places += 1
print(places, len(seen))
'''


@pytest.mark.parametrize(("kind", "at_least"), [("objects", 30), ("local", 40)])
def test_sigkill_between_any_two_writes(tmp_path: Path, kind: str, at_least: int) -> None:
    places, states = map(int, output_of(KILLED_BETWEEN_ANY_TWO_WRITES, kind, tmp_path).split())
    # The four states: a b, a c (replaced), a c d (committed), c d (the oldest deleted).
    assert places > at_least and states == 4
