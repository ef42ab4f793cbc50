"""Copies the run's files beside its remote checkpoints, so that another machine can resume the run.

    run.dir ──in a thread──▶ <checkpoint.dir>/run/000002/metrics.jsonl@0-5120 ...  ──fetch──▶ run.dir of another machine

The journal is copied last, so that the other files in a copy have all that it refers to. An error of the store is
logged, counted and retried; it never ends the run. docs/checkpoint-format.md has the layout.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rollover.checkpoint.storage import is_plain_name

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
# Files that only grow are copied in parts, others whole. Sizes of journal files are read first, and the files copied
# last: other files are written before the journal refers to them.
_WHOLE = (
    "config.resolved*.json",
    "checkpointed",
    "finished",
    "tracked_as",
    "evaluations/step-*.jsonl",
    "rollouts/step-*.parquet",
)
_GROWING = ("eval.jsonl", "trace.jsonl", "rollouts/step-*.jsonl", METRICS)
_JOURNAL = "journal/*.journal"
_COMPLETE = "complete"  # marks a complete copy
_PART_BYTES = 1 << 20


class Mirror:
    """Copies the files of the run in `folder` to `root` of the fsspec file system `fs`.

    Every process makes its own copy, `root`/<number>, and deletes earlier ones when it is complete. `guard` turns
    errors of reading into ValueError. `failed`: number of failed attempts.
    """

    def __init__(self, fs: Any, root: str, folder: Path, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self.fs, self.root, self.folder, self.guard = fs, root, folder, guard
        self.failed = 0
        self._failing = False
        self._thread = ThreadPoolExecutor(1, "mirror")  # one copy at a time
        self._last: Future[None] | None = None
        self._copy = ""  # its path
        self._is_complete = False  # whether the copy is complete
        self._made: set[str] = set()  # folders that exist in the store
        self._stamps: dict[str, tuple[int, int]] = {}  # (mtime, size) of files that were copied whole
        self._sizes: dict[str, int] = {}  # copied bytes of growing files

    # Copying

    def beat(self) -> None:
        """Begin to copy new data, unless a copy is in progress."""
        if self._last is None or self._last.done():
            self._last = self._thread.submit(self._attempt)

    def copy(self) -> None:
        """Copy all data that exists now; return when that is done, or has failed."""
        self._last = self._thread.submit(self._attempt)
        self._last.result()

    def close(self) -> None:
        """Copy a last time, unless the process ended before its run began."""
        if self._last is not None:
            self.copy()
        self._thread.shutdown()

    def _attempt(self) -> None:
        try:
            self._copy_all()
            self._failing = False
        except Exception as error:  # boundary: every store has its own errors
            self.failed += 1
            if not self._failing:
                logger.warning(
                    f"the run's files cannot be copied to {self.root} ({type(error).__name__}: {error}): it is"
                    " retried. Meanwhile a run whose machine is lost continues from what is there"
                )
            self._failing = True

    def _copy_all(self) -> None:
        if not self._copy:
            self._copy = self._at(max(self._numbers(), default=0) + 1)
        journal = self._with_sizes(_JOURNAL)
        for file in self._files(*_WHOLE):
            self._copy_whole(file)
        growing = self._with_sizes(*_GROWING)
        for file, size in [*growing, *journal]:
            self._copy_growth(file, size)
        for file in set(self._sizes) - {file for file, _ in growing} - set(self._files(_JOURNAL)):
            self._remove(file)  # deleted when a checkpoint was committed
        if not self._is_complete:
            self._put(_COMPLETE, b"")
            for number in self._numbers():
                if self._at(number) != self._copy:
                    self.fs.rm(self._at(number), recursive=True)
            self._is_complete = True

    def _files(self, *patterns: str) -> list[str]:
        """Return the names of files in the folder that match a pattern."""
        return [str(path.relative_to(self.folder)) for p in patterns for path in sorted(self.folder.glob(p))]

    def _with_sizes(self, *patterns: str) -> list[tuple[str, int]]:
        found = []
        for file in self._files(*patterns):
            with contextlib.suppress(FileNotFoundError):  # a journal file, deleted meanwhile
                found.append((file, (self.folder / file).stat().st_size))
        return found

    def _copy_whole(self, file: str) -> None:
        status = (self.folder / file).stat()
        stamp = status.st_mtime_ns, status.st_size
        if self._stamps.get(file) != stamp:
            self._put(file, (self.folder / file).read_bytes())
            self._stamps[file] = stamp

    def _copy_growth(self, file: str, size: int) -> None:
        """Copy bytes up to `size`. The last part is replaced by a longer one until it is full: stores cannot append."""
        done = self._sizes.get(file, 0)
        while done < size:
            start = done - done % _PART_BYTES
            end = min(size, start + _PART_BYTES)
            content = self._read(file, start, end)
            if len(content) < end - start:
                return  # deleted, or cut back, meanwhile
            self._put(f"{file}@{start}-{end}", content)
            shorter = f"{self._copy}/{file}@{start}-{done}"
            self._sizes[file], was_there = end, done > start
            done = end
            if was_there:
                self.fs.rm_file(shorter)

    def _read(self, file: str, start: int, end: int) -> bytes:
        with contextlib.suppress(FileNotFoundError), open(self.folder / file, "rb") as content:
            content.seek(start)
            return content.read(end - start)
        return b""

    def _put(self, name: str, content: bytes) -> None:
        path = f"{self._copy}/{name}"
        folder = os.path.dirname(path)
        if folder not in self._made:
            self.fs.makedirs(folder, exist_ok=True)
            self._made.add(folder)
        self.fs.pipe_file(path, content)

    def _remove(self, file: str) -> None:
        for path in self._found(self._copy):
            if path.startswith(f"{self._copy}/{file}@"):
                self.fs.rm_file(path)
        del self._sizes[file]

    # Reading

    def files(self) -> dict[str, list[str]]:
        """Return file -> paths of its parts, in order, of the newest complete copy. {} without a copy."""
        with self.guard():
            for number in reversed(self._numbers()):
                found, prefix = self._found(self._at(number)), f"{self._at(number)}/"
                if f"{prefix}{_COMPLETE}" in found:
                    files = _in_order({path.removeprefix(prefix): size for path, size in found.items()})
                    return {file: [prefix + part for part in parts] for file, parts in files.items()}
        return {}

    def fetch(self) -> None:
        """Download the newest complete copy. The metrics come last: a folder without them holds no run."""
        files = self.files()
        for file in sorted(files, key=lambda file: file == METRICS):
            if not is_plain_name(file):
                raise ValueError(f"{self.root} names a file outside of the run: {file!r}")
            path = self.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
            with self.guard(), open(temporary, "wb") as target:
                for part in files[file]:
                    target.write(self.fs.cat_file(part))
            os.replace(temporary, path)

    def _numbers(self) -> list[int]:
        """Return the numbers of the copies in the store, complete or not."""
        self.fs.invalidate_cache()
        try:
            entries = [os.path.basename(path.rstrip("/")) for path in self.fs.ls(self.root, detail=False)]
        except FileNotFoundError:
            return []
        return sorted(int(entry) for entry in entries if entry.isdecimal())

    def _at(self, number: int) -> str:
        return f"{self.root}/{number:06d}"

    def _found(self, copy: str) -> dict[str, int]:
        """Return the paths in one copy, with their sizes."""
        self.fs.invalidate_cache()
        return {path: entry["size"] for path, entry in self.fs.find(copy, detail=True).items()}


def _in_order(found: Mapping[str, int]) -> dict[str, list[str]]:
    """Return file -> its parts, as far as they are contiguous from its beginning. `found`: part -> size."""
    longest: dict[str, dict[int, tuple[int, str]]] = {}
    for name, size in found.items():
        file, _, span = name.partition("@")
        start, end = map(int, span.split("-")) if span else (0, size)
        if file != _COMPLETE and size == end - start:  # otherwise its upload was interrupted
            parts = longest.setdefault(file, {})
            parts[start] = max((end, name), parts.get(start, (0, "")))
    files: dict[str, list[str]] = {}
    for file, parts in longest.items():
        at, files[file] = 0, []
        for start, (end, name) in sorted(parts.items()):
            if start == at:
                files[file].append(name)
                at = end
    return files
