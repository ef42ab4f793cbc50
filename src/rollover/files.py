"""Files: durable writes; and in words, whether a place can be written to and which existing path was meant.

Owns no file. Imports nothing heavy; fsspec only where a path is a URL.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from rollover.alike import alike


def check_writable(where: str | Path, name: str) -> None:
    """Write a file into `where` (a local folder or an fsspec URL) and remove it: a failure comes before the work.

    A local folder that does not exist yet is not made: the nearest one above it is tried. Raises ValueError that begins
    with `name` (the configuration key or the option that gave the place).
    """
    probe = _probe_name()
    if "://" in str(where):
        _check_remote(str(where), name, probe)
    elif reason := _why_not(Path(where).expanduser().absolute(), probe):
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
    """As `check_writable`, for a file that an option names: its folder must exist."""
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
    return [str(c) for c in candidates if c.exists()]


def did_you_mean_path(path: str | Path, suffixes: Collection[str] = ()) -> str:
    """The end of a message about a path that does not exist."""
    near = near_paths(path, suffixes)
    return f". Did you mean {' or '.join(near)}?" if near else ". Check the path"


def read_tables(path: Path) -> dict[str, Any]:
    """A JSON file of tables, such as config.resolved.json. ValueError that names it where it is damaged."""
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            raise ValueError("it holds no tables")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore the file") from error
    return tables


def give_usual_mode(path: str | Path) -> None:
    """Give a file the mode that open() gives (0666 less the umask).

    safetensors leaves 0600, and then nobody else can read the model.
    """
    path = Path(path)
    example = path.with_name(f".{path.name}.mode-{os.getpid()}")
    with open(example, "wb") as file:  # the umask cannot be read without changing it, for all threads
        mode = os.fstat(file.fileno()).st_mode
    example.unlink()
    path.chmod(stat.S_IMODE(mode))


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """An OSError of the block names the file, which one of a write or a sync by itself does not."""
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
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
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
