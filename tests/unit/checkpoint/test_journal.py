"""The journal's files: nothing that was appended is lost to a kill, nothing that is damaged is trusted."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from heard import hear
from rollover.checkpoint.journal import Journal, Mark, Record

SAID: list[str] = []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hear(SAID).clear()
    return tmp_path / "journal"


def open_journal(folder: Path) -> Journal:
    return Journal(folder)


def record(i: int) -> Record:
    return Record({"kind": "fact", "number": i}, bytes(range(i % 7)) * 30)


def written(folder: Path, num: int = 5) -> Mark:
    """A journal of the start of a run with `num` records."""
    journal = open_journal(folder)
    mark = journal.begin(None)
    for i in range(num):
        journal.append(*record(i))
    journal.close()
    return mark


def told(folder: Path, mark: Mark | None = None) -> list[Record]:
    return [r for part in open_journal(folder).read(mark) for r in part.records()]


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_what_is_appended_is_read_back(folder: Path) -> None:
    mark = written(folder)
    assert told(folder) == told(folder, mark) == [record(i) for i in range(5)]
    assert [part.kinds for part in open_journal(folder).read(mark)] == [{"head", "fact"}]
    assert SAID == []


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_removed_file_is_reported_and_replaced_later(folder: Path, how: str) -> None:
    journal = open_journal(folder)
    journal.begin(None)
    journal.append(*record(0))
    journal.sync()
    away = folder.with_name("away")
    folder.rename(away)
    if how == "replaced":
        shutil.copytree(away, folder)
    if how != "moved":
        shutil.rmtree(away)
    deadline = time.monotonic() + 60
    while journal.writes:  # the sync before this one may still be under way
        journal.sync()
        assert time.monotonic() < deadline
    journal.append(*record(1))
    journal.sync()
    assert journal.failed == len(SAID) == 1 and f"the journal cannot be written to {folder}: " in SAID[0]
    mark = journal.begin("step-000001")
    journal.append(*record(2))
    journal.close()
    assert told(folder, mark) == [record(2)] and len(SAID) == 1


def test_an_empty_file_is_said(folder: Path) -> None:
    """As a lost power supply may leave it: its entry was on the disk, and its content was not."""
    mark = written(folder)
    only_file(folder).write_bytes(b"")
    assert told(folder, mark) == told(folder) == []
    assert len(SAID) == 2 and all(f"{only_file(folder)} is empty: what happened after" in line for line in SAID)


def test_commit_deletes_files_before_the_checkpoint(folder: Path) -> None:
    journal = open_journal(folder)
    start = journal.begin(None)
    journal.append(*record(0))
    cut = journal.begin("step-000010")
    journal.append(*record(1))
    size = journal.num_bytes
    assert told(folder, start) == [record(0), record(1)], "the checkpoint may never be committed"
    assert told(folder, cut) == [record(1)]
    journal.commit(cut)
    assert len(list(folder.iterdir())) == 1 and journal.num_bytes < size
    journal.append(*record(2))
    journal.close()
    assert told(folder, cut) == [record(1), record(2)]
    assert told(folder, start) == [] and "000001.journal is missing" in SAID[-1]


def test_torn_last_record_is_cut_reported_and_counted(folder: Path) -> None:
    written(folder, 3)
    path = only_file(folder)
    whole = path.read_bytes()
    ends = [i for i in range(1, len(whole)) if whole.startswith(b"RLVJ", i)] + [len(whole)]

    def check(content: bytes, num: int) -> None:
        """Of `content` the first `num` records are trusted, and the head."""
        path.write_bytes(content)
        SAID.clear()
        journal, cut = open_journal(folder), len(content) - (ends[num] if num >= 0 else 0)
        parts = journal.read(None)
        assert [r for part in parts for r in part.records()] == [record(i) for i in range(num)]
        assert journal.cut_bytes == cut and len(SAID) == (cut > 0 or not content)
        if cut:
            assert f"{path} ends within record {num + 1}," in SAID[0] and f"the last {cut} bytes are cut" in SAID[0]

    for size in range(len(whole) + 1):
        check(whole[:size], sum(end <= size for end in ends) - 1)
    check(whole[:-1] + b"\0", 2)
    check(whole + b"\0" * 100, 3)


def test_flipped_byte_ends_trust_and_is_reported(folder: Path) -> None:
    written(folder, 6)
    path = only_file(folder)
    whole = path.read_bytes()
    rng = random.Random(0)
    starts = [i for i in range(len(whole)) if whole.startswith(b"RLVJ", i)]
    for at in rng.sample(range(starts[-1]), 200):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        SAID.clear()
        hit = max(n for n, start in enumerate(starts) if start <= at)
        assert told(folder) == [record(i) for i in range(hit - 1)]
        (line,) = SAID
        lost = len(whole) - starts[hit]
        assert f"{path} is damaged at byte {starts[hit]} (record {hit}): the {lost} bytes from there on are not" in line


def test_writing_goes_on_after_what_is_trusted(folder: Path) -> None:
    mark = written(folder, 2)
    path = only_file(folder)
    path.write_bytes(path.read_bytes()[:-3])
    journal = open_journal(folder)
    (part,) = journal.read(mark)
    journal.resume(part)
    journal.append(*record(7))
    journal.close()
    assert len(SAID) == 1 and told(folder, mark) == [record(0), record(7)] and len(SAID) == 1, (
        "it is cut, and said once"
    )


def test_foreign_or_headless_journal_is_not_used(folder: Path, tmp_path: Path) -> None:
    mark = written(folder)
    assert told(folder, Mark("another", 1)) == [] and "belongs to another run" in SAID[-1]
    only_file(folder).rename(folder / "000002.journal")
    assert told(folder, mark._replace(number=2)) == [] and "belongs to another run" in SAID[-1]
    journal = open_journal(tmp_path / "later")
    later = journal.begin("step-000010")
    journal.append(*record(0))
    journal.close()
    assert told(tmp_path / "later", later) == [record(0)]
    assert told(tmp_path / "later") == [] and "it begins at step-000010, which is not there" in SAID[-1]


def test_a_file_that_a_gap_precedes_is_not_reached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full for a while: what came after that is known to the checkpoint alone that was begun then."""
    journal = open_journal(folder)
    start = journal.begin(None)
    journal.append(*record(0))
    with monkeypatch.context() as patched:
        fill_disk(patched, room=0)
        journal.append(*record(1))
    journal.append(*record(2))
    cut = journal.begin("step-000010")
    journal.append(*record(3))
    journal.close()
    assert told(folder, start) == [record(0)] and told(folder, cut) == [record(3)]


def fill_disk(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """From now on `room` bytes can be written, as with a file system that is nearly full."""
    write = os.write
    left = room

    def limited(fd: int, data: Any) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(fd, bytes(data)[:left])
        left -= done
        return done

    monkeypatch.setattr(os, "write", limited)


@pytest.mark.parametrize("room", [0, 1, 30, 90])
def test_a_full_disk_is_said_once_and_leaves_whole_records(
    folder: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    journal = open_journal(folder)
    start = journal.begin(None)
    journal.append(*record(0))
    size = only_file(folder).stat().st_size
    fill_disk(monkeypatch, room)
    journal.append(*record(5))  # longer than the room
    assert only_file(folder).stat().st_size == size, "half a record lies there"
    monkeypatch.undo()
    journal.append(*record(2))
    assert journal.failed == 1 and not journal.writes
    assert len(SAID) == 1 and "No space left" in SAID[0] and str(folder) in SAID[0]
    assert told(folder, start) == [record(0)]
    cut = journal.begin("step-000010")
    journal.append(*record(3))
    journal.close()
    assert told(folder, cut) == [record(3)] and journal.failed == 1


def test_a_disk_that_fails_to_sync_ends_the_journal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(folder)
    journal.begin(None)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        journal.append(*record(0))
        journal.sync()
        journal.close()
    assert journal.failed and "Input/output error" in SAID[0]


def test_disk_error_is_noticed_without_an_append(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk tells it once: the next sync would succeed, and what the failed one should have brought is gone."""
    journal = open_journal(folder)
    journal.begin(None)
    fsync, failures, ended = os.fsync, [OSError(errno.EIO, os.strerror(errno.EIO))], threading.Event()

    def fail_once(fd: int) -> None:
        try:
            if failures:
                raise failures.pop()
            fsync(fd)
        finally:
            ended.set()

    journal.append(*record(0))
    monkeypatch.setattr(os, "fsync", fail_once)
    journal.sync()
    assert ended.wait(60)
    for _ in range(1000):  # the timer's, while nothing happens to any rollout
        journal.sync()
        if not journal.writes:
            break
        time.sleep(0.001)
    assert journal.failed == 1 and not journal.writes and "Input/output error" in SAID[0]
    journal.close()


def test_undeletable_files_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    journal = open_journal(folder)
    journal.begin(None)
    journal.append(*record(0))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", fail)
        cut = journal.begin("step-000010")
        journal.commit(cut)
        journal.append(*record(1))
        assert len(SAID) == 1 and f"{folder} could not be deleted: Permission denied" in SAID[0]
        assert told(folder, cut) == [record(1)]
    later = journal.begin("step-000020")
    journal.commit(later)
    journal.close()
    assert [path.name for path in folder.iterdir()] == ["000003.journal"] and len(SAID) == 1


def test_unreadable_file_is_an_error(folder: Path) -> None:
    (folder / "000001.journal").mkdir(parents=True)
    (folder / "000001.journal" / "something").touch()
    with pytest.raises(ValueError, match=r"000001.journal cannot be read \(Is a directory\): fix that, or delete"):
        told(folder)


def test_failed_report_does_not_prevent_the_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output may be on the same full disk."""

    def fail(line: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    hear(fail)
    journal = Journal(folder)
    start = journal.begin(None)
    journal.append(*record(0))
    with monkeypatch.context() as patched:
        fill_disk(patched, room=10)
        with pytest.raises(OSError, match="No space left"):
            journal.append(*record(5))
    journal.append(*record(1))
    assert not journal.writes and told(folder, start) == [record(0)]
