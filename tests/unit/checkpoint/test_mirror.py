"""The run's files beside remote checkpoints: whatever moment the machine is lost at, what is fetched fits together."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from heard import hear
from rollover.checkpoint.mirror import Mirror
from rollover.checkpoint.store import CheckpointStore
from scripted import output_of


@pytest.fixture
def store() -> CheckpointStore:
    return CheckpointStore(f"memory://mirror-{uuid.uuid4().hex}", keep=2)


SAID: list[str] = []


def mirror(store: CheckpointStore, folder: Path) -> Mirror:
    hear(SAID).clear()
    made = store.mirror(folder)
    assert made is not None
    return made


def fetched(store: CheckpointStore, folder: Path) -> dict[str, bytes]:
    mirror(store, folder).fetch()
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write(folder: Path, file: str, content: bytes) -> None:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    with (folder / file).open("ab") as target:
        target.write(content)


def objects(store: CheckpointStore) -> list[str]:
    fs, root = fsspec.core.url_to_fs(store.dir)
    return sorted(path.removeprefix(f"{root}/run/") for path in fs.find(root))


def test_a_local_store_needs_no_copy(tmp_path: Path) -> None:
    assert CheckpointStore(str(tmp_path), keep=2).mirror(tmp_path) is None


def test_what_grows_is_fetched_as_it_was_and_in_few_parts(store: CheckpointStore, tmp_path: Path) -> None:
    files = ("metrics.jsonl", "eval.jsonl", "trace.jsonl", "rollouts/step-000001.jsonl", "journal/000001.journal")
    run, expected = tmp_path / "run", dict.fromkeys(files, b"")
    copy = mirror(store, run)
    assert copy.files() == {}
    for i in range(12):
        for n, file in enumerate(files):
            content = bytes([65 + i]) * (300_000 if n == 2 else 1000 * n + 7)
            write(run, file, content)
            expected[file] += content
        copy.copy()
        assert fetched(store, tmp_path / f"other-{i}") == expected
    assert len(objects(store)) == 4 + 4 + 1, "one part for each file, four for the largest, and one that says: complete"
    assert SAID == []


def test_only_changed_whole_files_are_copied_again(store: CheckpointStore, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, "config.resolved.json", b"{}")
    write(run, "model/model.safetensors", b"weights")
    write(run, "lock", b"process 7")
    copy = mirror(store, run)
    copy.copy()
    (run / "config.resolved.json").write_bytes(b"[1]")
    write(run, "config.resolved.1.json", b"{}")
    copy.copy()
    assert fetched(store, tmp_path / "other") == {"config.resolved.1.json": b"{}", "config.resolved.json": b"[1]"}


def test_files_of_the_journal_go_when_they_are_deleted(store: CheckpointStore, tmp_path: Path) -> None:
    run = tmp_path / "run"
    copy = mirror(store, run)
    write(run, "journal/000001.journal", b"one")
    copy.copy()
    write(run, "journal/000002.journal", b"two")
    (run / "journal" / "000001.journal").unlink()
    copy.copy()
    assert fetched(store, tmp_path / "other") == {"journal/000002.journal": b"two"}
    assert len(objects(store)) == 2


def test_a_copy_counts_when_it_is_whole_and_then_alone(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process has cut its files back, and its machine is lost in the middle of its first copying."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, content in ((first, b"long"), (second, b"l")):
        write(folder, "eval.jsonl", content)
        write(folder, "metrics.jsonl", content)
    mirror(store, first).copy()
    copy = mirror(store, second)
    with monkeypatch.context() as patched:
        fail_at(patched, "metrics.jsonl")
        copy.copy()
    assert fetched(store, tmp_path / "a") == {"eval.jsonl": b"long", "metrics.jsonl": b"long"}
    copy.copy()
    assert fetched(store, tmp_path / "b") == {"eval.jsonl": b"l", "metrics.jsonl": b"l"}
    assert not [name for name in objects(store) if not name.startswith("000002/")]


def test_process_without_a_run_keeps_earlier_copy(store: CheckpointStore, tmp_path: Path) -> None:
    """Refused when it was resumed, say, since its files are older than those of the machine that went on."""
    write(tmp_path / "newer", "metrics.jsonl", b"newer")
    mirror(store, tmp_path / "newer").copy()
    write(tmp_path / "older", "metrics.jsonl", b"old")
    mirror(store, tmp_path / "older").close()
    assert fetched(store, tmp_path / "other") == {"metrics.jsonl": b"newer"}


def fail_at(monkeypatch: pytest.MonkeyPatch, part: str) -> list[str]:
    """The store refuses every object with `part` in its name; returns those."""
    store, refused = fsspec.get_filesystem_class("memory"), []
    plain = store.pipe_file

    def pipe_file(self: Any, path: str, value: bytes, **options: Any) -> None:
        if part in path:
            refused.append(path)
            raise TimeoutError("503: try again")
        plain(self, path, value, **options)

    monkeypatch.setattr(store, "pipe_file", pipe_file)
    return refused


def test_failing_store_is_reported_once_counted_and_retried(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    copy = mirror(store, run)
    for content in (b"1", b"2"):
        with monkeypatch.context() as patched:
            write(run, "metrics.jsonl", content)
            refused = fail_at(patched, "metrics.jsonl")
            for _ in range(3):
                copy.copy()
        assert len(refused) == 3
        copy.copy()
    assert copy.failed == 6 and len(SAID) == 2, "once for each time that it begins to fail"
    assert "the run's files cannot be copied to " in SAID[0] and "(TimeoutError: 503: try again)" in SAID[0]
    assert fetched(store, tmp_path / "other") == {"metrics.jsonl": b"12"}


def test_a_store_that_hangs_holds_nothing_up(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "metrics.jsonl", b"1")
    copy = mirror(store, tmp_path)
    began, answers, asked = threading.Event(), threading.Event(), 0
    plain = fsspec.get_filesystem_class("memory").pipe_file

    def hangs(self: Any, path: str, value: bytes, **options: Any) -> None:
        nonlocal asked
        asked += 1
        began.set()
        assert answers.wait(60)
        plain(self, path, value, **options)

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", hangs)
    for _ in range(100):
        copy.beat()
    assert began.wait(60)
    write(tmp_path, "metrics.jsonl", b"2")
    answers.set()
    copy.close()
    assert fetched(store, tmp_path / "other")["metrics.jsonl"] == b"12"
    assert asked == 3, "1, that it is complete, and 12"


LOST_AT_EVERY_PLACE = '''
"""A run whose machine is lost before each change of an object store, or in the middle of one."""
import json, os, shutil, signal, sys
from pathlib import Path
from dying_store import Objects
from rollover.checkpoint.journal import Journal, Mark
from rollover.checkpoint.store import CheckpointStore

root = Path(sys.argv[1])
remote = root / "remote"

def opened(folder):
    store = CheckpointStore(f"objects://{remote}", keep=2)
    return store, store.mirror(folder), Journal(folder / "journal")

def live(folder, known):
    """Three facts, a checkpoint that knows how many there were, three more, another; copies all the time."""
    store, mirror, journal = opened(folder)

    def checkpoint():
        mark = journal.begin(f"step-{known:06d}")
        mirror.copy()
        store.write(f"step-{known:06d}", {"known": json.dumps([known, mark]).encode()})
        journal.commit(mark)

    if known:  # as a run that was resumed
        checkpoint()
    else:
        journal.begin(None)
    for i in range(7):
        # As a step: its row first, then the record that says that the row is written.
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(f"{known}\\n")
        journal.append({"kind": "fact", "number": known})
        known += 1
        mirror.copy()
        if i in (2, 5):
            checkpoint()
    mirror.copy()
    assert not mirror.failed
    os._exit(0)

def look(name):
    """(a new machine's folder, how many facts it finds)."""
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    store, mirror, journal = opened(folder)
    if not mirror.files():
        return folder, 0
    mirror.fetch()
    known, mark = 0, None
    if names := store.list():
        known, mark = json.loads(Path(store.open(names[-1])["known"]).read_text())
    facts = [r.meta["number"] for part in journal.read(mark and Mark(*mark)) for r in part.records()]
    assert facts == list(range(known, known + len(facts))), (known, facts)
    known += len(facts)
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    assert [int(row) for row in rows[:known]] == list(range(known)), (rows, known)
    (folder / "metrics.jsonl").write_text("".join(f"{n}\\n" for n in range(known)))
    return folder, known

places = 0
for start in ("nothing", "a copy"):
    before = 0
    for left in range(10**6):
        shutil.rmtree(remote, ignore_errors=True)
        if start == "a copy":
            shutil.copytree(root / "lost", remote)
        folder, known = look("run")
        child = os.fork()
        if child == 0:
            Objects.left = left
            live(folder, known)
        _, status = os.waitpid(child, 0)
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
        _, found = look("other")
        assert found >= max(before, known), (start, left, known, before, found)
        before = found
        if left == 40 and start == "nothing":
            shutil.copytree(remote, root / "lost")
        if status == 0:
            break
        places += 1
    print(start, places, found - known)
'''


def test_machine_lost_between_any_two_store_changes(tmp_path: Path) -> None:
    """What a new one finds is never less than before, fits together, and goes on."""
    output = output_of(LOST_AT_EVERY_PLACE, tmp_path)
    first, second = (line.split() for line in output.splitlines())
    assert int(first[-2]) > 50 and int(second[-2]) > 130 and first[-1] == second[-1] == "7", output
