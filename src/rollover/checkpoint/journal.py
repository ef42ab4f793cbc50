"""The journal: append-only files of records beside the checkpoints. docs/checkpoint-format.md has the format.

    <folder>/000003.journal:  head, record, record, ..., end (names the next file)

A file begins at a checkpoint, which names it; at the next checkpoint it ends and another one begins. So from any
committed checkpoint one chain of files leads to the last record. Owns the files, their durability, and which part of a
file is trusted. Never looks into records.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import re
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollover.files import fsync_dir

logger = logging.getLogger(__name__)

FORMAT = 1
HEAD, END = "head", "end"  # the kinds of the journal's own records
_MAGIC = b"RLVJ"
# After the magic: bytes of meta, bytes of data, sequence number, CRC-32 of these three and of both parts.
_HEADER = struct.Struct("<4sIIQI")
_FILE = re.compile(r"(\d{6,})\.journal")


class Record(NamedTuple):
    """`meta`: JSON, with its "kind". `data`: raw bytes, described by `meta`."""

    meta: dict[str, Any]
    data: bytes


class Mark(NamedTuple):
    """The file in which the journal continues after a checkpoint: number `number` of the journal `run`."""

    run: str
    number: int


@dataclass(frozen=True)
class JournalFile:
    """A file of the journal, of which the first `num_bytes` are trusted: `num_records` records of these `kinds`.

    `problem`: why the rest is not trusted; "" without a rest.
    """

    path: Path
    num_bytes: int
    num_records: int
    kinds: frozenset[str] = frozenset()
    problem: str = ""

    def records(self) -> Iterator[Record]:
        """Iterate over all records but the journal's own, in order."""
        if not self.num_bytes:
            return
        with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for record, end in _whole(content):
                if end > self.num_bytes:
                    break
                if record.meta["kind"] not in (HEAD, END):
                    yield record


def encode_record(meta: Mapping[str, Any], data: bytes, sequence: int) -> bytes:
    """Encode a record for a file."""
    text = json.dumps(meta, separators=(",", ":")).encode()
    counts = struct.pack("<IIQ", len(text), len(data), sequence)
    return b"".join((_MAGIC, counts, struct.pack("<I", _crc(counts, text, data)), text, data))


def _write_all(fd: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]


def _crc(*parts: bytes) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def _record_at(content: bytes | mmap.mmap, at: int) -> tuple[Record, int, int] | None:
    """Return (record, its sequence number, its end), if a whole record begins at `at`."""
    body = at + _HEADER.size
    if body > len(content):
        return None
    magic, num_meta, num_data, sequence, crc = _HEADER.unpack_from(content, at)
    end = body + num_meta + num_data
    if magic != _MAGIC or end > len(content):
        return None
    text, data = content[body : body + num_meta], content[body + num_meta : end]
    if _crc(content[at + 4 : at + 20], text, data) != crc:
        return None
    return Record(json.loads(text), data), sequence, end


def _whole(content: bytes | mmap.mmap) -> Iterator[tuple[Record, int]]:
    """Iterate over (record, its end), up to the first that is damaged or out of sequence."""
    at = expected = 0
    while (found := _record_at(content, at)) is not None and found[1] == expected:
        record, _, at = found
        expected += 1
        yield record, at


def _why_no_more(path: Path, content: mmap.mmap, at: int, num: int) -> str:
    """Describe the problem at byte `at`, where record `num` should begin. A whole record later means damage."""
    later = at
    while (later := content.find(_MAGIC, later + 1)) >= 0:
        if _record_at(content, later) is not None:
            return (
                f"the journal {path} is damaged at byte {at} (record {num}): the {len(content) - at} bytes from there"
                " on are not trusted, and are lost"
            )
    return (
        f"the journal {path} ends within record {num}, which was not written to its end: the last {len(content) - at}"
        " bytes are cut"
    )


def _why_foreign(head: Mapping[str, Any], mark: Mark | None, number: int) -> str:
    """Return why a file with that head does not continue from `mark`, to follow "it is not used: "; "" if it does."""
    if head.get("kind") != HEAD:
        return "it has no beginning"
    if head["format"] != FORMAT:
        return f"it has format {head['format']}, and this version reads {FORMAT}"
    if mark is None and head["checkpoint"] is not None:
        return f"it begins at {head['checkpoint']}, which is not there"
    if head["number"] != number or (mark is not None and head["run"] != mark.run):
        return "it belongs to another run"
    return ""


def holds_data(folder: Path) -> bool:
    """Return whether a record in a journal in `folder` has data: its run has generated something."""
    files = (JournalFile(path, path.stat().st_size, 0) for path in sorted(folder.glob("*.journal")))
    return any(record.data for file in files for record in file.records())


class Journal:
    """The journal of one run, in `folder`. Nothing is written before `begin`.

    When `append` returns, the operating system has the record: a killed process loses none. `sync` brings it to the
    disk, in a thread. A failed write ends the journal until the next `begin`: whole records stay, and nothing is
    written after the gap. `failed`: number of failed writes. `cut_bytes`: untrusted bytes of the files read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = uuid.uuid4().hex
        self.failed = self.cut_bytes = 0
        self._fd: int | None = None
        self._number = max(self._numbers(), default=0)
        self._size = self._earlier = self._sequence = 0
        self._syncs = ThreadPoolExecutor(1, "journal")
        self._last_sync: Future[None] | None = None

    @property
    def writes(self) -> bool:
        """Whether records are written now."""
        return self._fd is not None

    @property
    def num_bytes(self) -> int:
        """Size of the files since the newest committed checkpoint."""
        return self._earlier + self._size

    # Writing

    def begin(self, checkpoint: str | None) -> Mark:
        """End the file and begin the next one, at a checkpoint (None: at the start of the run).

        The earlier files stay until `commit`: the checkpoint may fail.
        """
        number = self._number + 1
        head = {"kind": HEAD, "format": FORMAT, "run": self.run, "number": number, "checkpoint": checkpoint}
        first = encode_record(head, b"", 0)
        fd: int | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
            _write_all(fd, first)
            fsync_dir(self.folder)
            self.append({"kind": END, "next": number})  # of the earlier file
            self.halt()
        except OSError as error:
            self.halt()
            self._report(error)
            if fd is not None:
                os.close(fd)
            fd = None
        self._earlier += self._size
        self._fd, self._number, self._size, self._sequence = fd, number, len(first), 1
        return Mark(self.run, number)

    def resume(self, file: JournalFile) -> None:
        """Continue after the trusted part of a file that `read` returned."""
        try:
            self._fd = os.open(file.path, os.O_WRONLY | os.O_APPEND)
            os.ftruncate(self._fd, file.num_bytes)
            self._size, self._sequence = file.num_bytes, file.num_records
        except OSError as error:
            self._fail(error)

    def commit(self, mark: Mark) -> None:
        """Delete the files before `mark`, whose checkpoint is committed."""
        self._delete(lambda number: number < mark.number)
        self._earlier = 0

    def append(self, meta: Mapping[str, Any], data: bytes = b"") -> None:
        """Add a record, unless the journal has ended with an error. `meta`: JSON, with its "kind"."""
        if self._fd is None:
            return
        try:
            self._is_syncing()
            record = encode_record(meta, data, self._sequence)
            _write_all(self._fd, record)
            self._size, self._sequence = self._size + len(record), self._sequence + 1
        except OSError as error:
            self._fail(error)

    def sync(self) -> None:
        """Begin to sync all records to the disk. The next call of `sync` or `append` handles an error.

        A file that was removed or replaced is an error, too.
        """
        if self._fd is None:
            return
        try:
            if not self._is_syncing():
                if not os.path.samestat(os.fstat(self._fd), os.stat(self._path(self._number))):
                    raise OSError("its file was replaced by another")
                self._last_sync = self._syncs.submit(os.fsync, self._fd)
        except OSError as error:
            self._fail(error)

    def _is_syncing(self) -> bool:
        """Return whether a sync is in flight. Raises the error of one that has ended."""
        if self._last_sync is None or not self._last_sync.done():
            return self._last_sync is not None
        synced, self._last_sync = self._last_sync, None
        synced.result()
        return False

    def close(self) -> None:
        """End the journal; return when all records are on disk."""
        self.halt()
        self._syncs.shutdown()

    def halt(self) -> None:
        """Stop writing until the next `begin`; return when all records are on disk."""
        if self._fd is None:
            return
        try:
            if self._last_sync is not None:
                self._last_sync.result()
            os.fsync(self._fd)
        except OSError as error:
            self._report(error)
        self._close()

    def _fail(self, error: OSError) -> None:
        """Cut back to the last whole record, and stop writing."""
        if self._fd is not None:
            with contextlib.suppress(OSError):  # a reader cuts half a record, too
                os.ftruncate(self._fd, self._size)
            self._close()
        self._report(error)

    def _close(self) -> None:
        synced, self._last_sync = self._last_sync, None
        if synced is not None:
            synced.exception()  # waits for its end: the thread uses the descriptor
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _report(self, error: OSError) -> None:
        self.failed += 1
        logger.warning(
            f"the journal cannot be written to {self.folder}: {error.strerror or error}. What follows is in no journal"
            " until the next checkpoint begins a new one"
        )

    # Reading

    def read(self, mark: Mark | None) -> list[JournalFile]:
        """Return the chain of files from `mark` on (None: from the start of the run); [] where there is none.

        A missing file, or one of another run, ends the chain; so does a damaged or truncated one, after its last whole
        record. Each is logged. ValueError for a file that cannot be read.
        """
        number = 1 if mark is None else mark.number
        self._number = max(self._number, number if mark is not None else 0)
        files: list[JournalFile] = []
        while number:
            path = self._path(number)
            if not path.exists():
                if mark is not None or files:
                    logger.warning(f"the journal {path} is missing: what happened after its beginning is lost")
                break
            try:
                file, head, following = self._scan(path)
            except OSError as error:
                raise ValueError(
                    f"--resume: the journal {path} cannot be read ({error.strerror or error}): fix that, or delete the"
                    f" folder {self.folder} to continue from the checkpoint alone"
                ) from error
            problem = "" if not head else _why_foreign(head, mark, number)
            if problem:
                logger.warning(f"the journal {path} is not used: {problem}")
                break
            self.cut_bytes += path.stat().st_size - file.num_bytes
            if file.problem:
                logger.warning(file.problem)
            if not head:
                break
            files.append(file)
            mark, number = Mark(head["run"], number), following
        if mark is not None:
            self.run = mark.run
        return files

    def discard(self) -> None:
        """Delete all files: no resumed run needs them."""
        self._delete(lambda number: True)
        self._number = 0

    def _scan(self, path: Path) -> tuple[JournalFile, dict[str, Any], int]:
        """Return (the file, its head, the number of the next file or 0)."""
        size = path.stat().st_size
        num = following = num_bytes = 0
        head: dict[str, Any] = {}
        kinds: set[str] = set()
        problem = "" if size else f"the journal {path} is empty: what happened after its beginning is lost"
        if size:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                for record, num_bytes in _whole(content):  # noqa: B007
                    if num == 0:
                        head = record.meta
                    following = record.meta["next"] if record.meta["kind"] == END else 0
                    kinds.add(record.meta["kind"])
                    num += 1
                if num_bytes < size:
                    problem = _why_no_more(path, content, num_bytes, num)
        return JournalFile(path, num_bytes, num, frozenset(kinds), problem), head, following

    def _delete(self, is_old: Callable[[int], bool]) -> None:
        """Delete files by number. A file that cannot be deleted does no harm: no chain leads to it."""
        try:
            for number in filter(is_old, self._numbers()):
                self._path(number).unlink(missing_ok=True)
        except OSError as error:
            logger.warning(f"old files of the journal in {self.folder} could not be deleted: {error.strerror or error}")

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.journal"

    def _numbers(self) -> list[int]:
        """Return the numbers of the files, in order."""
        entries = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(int(match[1]) for entry in entries if (match := _FILE.fullmatch(entry)))
