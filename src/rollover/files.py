"""Files: durable writes; bounded reads of files that others wrote; and in words, whether a place can be written to and
which existing path was meant.

Owns which folder relative paths begin in: user code may change the working directory at any time. Owns no file.
Imports nothing heavy; fsspec only where a path is a URL.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rollover.suggest import alike

MOST_LINE_BYTES = 1 << 27  # of a line that somebody else wrote; a rollout of 500,000 tokens has about 100 MB
MOST_ROW_BYTES = 1 << 24  # of a line of metrics.jsonl, eval.jsonl or trace.jsonl, and of a JSON file of settings

_started_in: list[str] = []  # by those of `paths_begin_in` that are open


@contextlib.contextmanager
def paths_begin_in(folder: str) -> Iterator[None]:
    """Make `local_path` and child processes begin in `folder` within the block, wherever user code changes to."""
    _started_in.append(folder)
    try:
        yield
    finally:
        _started_in.remove(folder)


def start_folder() -> str:
    """Return the folder of the innermost `paths_begin_in`, by default the working directory."""
    return _started_in[-1] if _started_in else os.getcwd()


def local_path(path: str | os.PathLike[str], base_dir: str | os.PathLike[str] = "") -> Path:
    """Return an absolute path: "~" is the home folder, a relative path begins in `base_dir`, that in `start_folder`."""
    path = Path(base_dir, Path(path).expanduser())
    return path if path.is_absolute() else Path(start_folder(), path)  # there may be no working directory any more


def short_path(path: Path) -> str:
    """Return the path, without `start_folder` where that is its beginning."""
    folder = start_folder()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading that others may have made.

    ValueError for a folder, a device or a pipe: reading those may block or never end. OSError as of `open`.
    """
    other = f"{path} is no file, but a folder, a device or a pipe"
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(other)  # before `open`, which has effects on some devices
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(other)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """Read a whole file of `open_regular`. ValueError where it has more than `most_bytes`."""
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{path} has more than {most_bytes:,} bytes")
    return content


def check_line(line: bytes, path: str | Path, most_bytes: int) -> None:
    """Raise ValueError, which names the file, for a line of more than `most_bytes`."""
    if len(line) > most_bytes:
        raise ValueError(f"{path} has a line of more than {most_bytes:,} bytes: restore the file")


def line_of(file: BinaryIO, path: str | Path, most_bytes: int = MOST_LINE_BYTES) -> bytes:
    """Read the next line with its end, b"" at the end of the file. ValueError where it is longer than `most_bytes`."""
    line = file.readline(most_bytes + 1)
    check_line(line, path, most_bytes)
    return line


def lines_of(file: BinaryIO, path: str | Path, most_bytes: int = MOST_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines that are left, as `line_of` reads them."""
    while line := line_of(file, path, most_bytes):
        yield line


def check_writable(where: str | Path, name: str) -> None:
    """Write a file into `where` (a local folder or an fsspec URL) and remove it: a failure comes before the work.

    A local folder that does not exist yet is not made: the nearest one above it is tried. Raises ValueError that begins
    with `name` (the configuration key or the option that gave the place).
    """
    probe = _probe_name()
    if "://" in str(where):
        _check_remote(str(where), name, probe)
    elif reason := _why_not(local_path(where), probe):
        raise ValueError(f"{name} = {str(where)!r} cannot be written to: {reason}. Give another place")


def _why_not(folder: Path, probe: str) -> str:
    """Why nothing can be written into a folder, or the nearest above it that exists; empty if something can."""
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        with open(folder / probe, "wb") as file:
            file.write(b"?")
            file.flush()
            os.fsync(file.fileno())  # some file systems refuse only then
    except OSError as error:
        return f"{error.strerror} ({folder})"
    finally:
        with contextlib.suppress(OSError):
            (folder / probe).unlink()
    return ""


def check_output_file(path: Path, name: str) -> None:
    """Check a file that an option names (see `check_writable`): its folder must exist."""
    if path.is_dir():
        raise ValueError(f"{name} {path} is a folder: give the name of a file in it")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{name} {path}: there is no folder {path.parent}{did_you_mean_path(path.parent)}")
    if reason := _why_not(path.absolute().parent, _probe_name()):
        raise ValueError(f"{name} {path} cannot be written: {reason}. Give another place")


def _probe_name() -> str:
    return f".rollover-probe-{os.getpid()}"


def _check_remote(where: str, name: str, probe: str) -> None:
    from fsspec.core import url_to_fs

    try:
        filesystem, root = url_to_fs(where)
        path = f"{root.rstrip('/')}/{probe}"
        filesystem.makedirs(root, exist_ok=True)
        filesystem.pipe_file(path, b"?")
        filesystem.rm_file(path)
    except Exception as error:  # boundary: every store has errors of its own
        raise ValueError(f"{name} = {where!r} cannot be written to: {type(error).__name__}: {error}") from error


def near_paths(path: str | Path, suffixes: Collection[str] = ()) -> list[str]:
    """Existing local paths that `path`, which does not exist, may have meant: its first missing part put right.

    `suffixes`: only files that end so (".jsonl") and folders. Empty if nothing is alike.
    """
    missing, rest = Path(path).expanduser(), []
    while not missing.parent.is_dir():
        rest.insert(0, missing.name)
        missing = missing.parent
    try:
        entries = [p for p in missing.parent.iterdir() if not suffixes or p.is_dir() or p.suffix in suffixes]
    except OSError:  # a folder that may not be listed
        return []
    # By stem: ".jsonl" alone makes short names half alike.
    near = alike(missing.stem, {p.stem for p in entries}, 3)
    candidates = [Path(p, *rest) for p in sorted(entries) if p.stem in near]
    return [short_path(c) for c in candidates if c.exists()]


def did_you_mean_path(path: str | Path, suffixes: Collection[str] = ()) -> str:
    """Return the end of a message about a path that does not exist."""
    near = near_paths(path, suffixes)
    return f". Did you mean {' or '.join(near)}?" if near else ". Check the path"


def read_object(path: Path, **kinds: type) -> dict[str, Any]:
    """Read a JSON file of one object. ValueError that names it where it is damaged, or a key is not of its `kinds`."""
    try:
        found = json.loads(read_regular(path, MOST_ROW_BYTES).decode("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        for key, kind in kinds.items():
            if type(found.get(key)) is not kind:
                raise ValueError(f"its {key} is {found.get(key)!r:.50}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore the file") from error
    return found


def read_tables(path: Path) -> dict[str, Any]:
    """Read a JSON file of tables, such as config.resolved.json. ValueError as of `read_object`."""
    tables = read_object(path)
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"{path} is damaged ({name} is no table): restore the file")
    return tables


def give_usual_mode(path: str | Path) -> None:
    """Give a file the mode that open() gives (0666 less the umask).

    safetensors leaves 0600, so that other users cannot read the model.
    """
    path = Path(path)
    example = path.with_name(f".{path.name}.mode-{os.getpid()}")
    with open(example, "wb") as file:  # the umask cannot be read without changing it, for all threads
        mode = os.fstat(file.fileno()).st_mode
    example.unlink()
    path.chmod(stat.S_IMODE(mode))


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the path to an OSError of the block, as errors of a write or sync lack it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def fsync_dir(path: str | Path) -> None:
    """Make the entries of a directory (a rename in it, say) durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def atomic_write_text(path: str | Path, text: str) -> None:
    """`atomic_write_bytes` of a text, as UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_bytes(path: str | Path, content: bytes | memoryview) -> None:
    """Replace the file at `path`: a reader, or a restart after a crash, sees the old content or the new one.

    A device or a pipe is written to, and stays what it is.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        with naming(path), open(path, "wb") as file:
            file.write(content)
        return
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}{threading.get_ident()}")
    try:
        with naming(path), open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)
