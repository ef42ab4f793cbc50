"""The content of a checkpoint: its files, written durably, and what vouches for them.

Knows nothing of where a checkpoint lies, nor what is in its files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollover.files import give_usual_mode

FORMAT_VERSION = 1
_CHUNK_BYTES = 1 << 22

FileWriter = Callable[[str], None] | bytes
FolderWriter = Callable[[str], None]
"""Writes files into the folder that it is given, which is empty; several processes may do so together. OSError where a
disk is at fault."""


def produce(path: str, content: FileWriter) -> None:
    """Write one file and make it durable."""
    if isinstance(content, bytes):
        Path(path).write_bytes(content)
    else:
        content(path)
        give_usual_mode(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fingerprint(path: str) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        return {"size": file.tell(), "sha256": digest.hexdigest()}


def manifest_text(files: Mapping[str, Mapping[str, Any]]) -> bytes:
    return json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1, sort_keys=True).encode() + b"\n"


def commit_text(manifest: bytes) -> bytes:
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"
