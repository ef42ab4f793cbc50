"""How the entries of a checkpoint directory are named, and what a name says."""

from __future__ import annotations

import os
import re

_NAME = re.compile(r"step-(\d+)")
# Of one step, in a remote store: the first upload, and .1, .2, ... of each that replaces it.
UPLOAD = re.compile(r"(step-\d+)(?:\.(\d+))?")
# .tmp-<name>-<pid>: being written or deleted. .old-<name>-<pid>: set aside while its replacement is renamed in.
LEFTOVER = re.compile(r"\.(tmp|old)-(step-\d+)-(\d+)")


def checkpoint_name(step: int) -> str:
    """`step-000020` for 20."""
    return f"step-{step:06d}"


def checkpoint_step(name: str) -> int:
    """The step in a checkpoint's name. Raises ValueError for anything else."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"checkpoint.resume_from: {name!r} is not the name of a checkpoint, such as step-000020")
    return int(match[1])


def name_of(entry: str) -> str | None:
    """The checkpoint that a directory entry holds: its own name, or the name it was set aside from."""
    if match := UPLOAD.fullmatch(entry):
        return match[1]
    match = LEFTOVER.fullmatch(entry)
    return match[2] if match and match[1] == "old" else None


def upload_number(upload: str) -> int:
    """Which of the uploads of one checkpoint it is, in order: 0, 1, 2, ..."""
    return int(upload.partition(".")[2] or 0)


def leftover(kind: str, name: str) -> str:
    return f".{kind}-{name}-{os.getpid()}"


def is_plain_name(file: str) -> bool:
    parts = file.split("/")
    return "\\" not in file and all(part not in ("", ".", "..") for part in parts)
