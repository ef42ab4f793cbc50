"""Reads a checkpoint, and believes nothing of it that was not verified."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from rollover.checkpoint.content import FORMAT_VERSION, commit_text, fingerprint
from rollover.checkpoint.entries import is_plain_name
from rollover.checkpoint.storage import Storage
from rollover.checkpoint.writing import COMMITTED, MANIFEST


class Damaged(Exception):
    """`problem` completes the name of the `file`: "is missing"."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file} {problem}")
        self.file, self.problem = file, problem


def read_checkpoint(storage: Storage, name: str, source: str) -> dict[str, str]:
    """The local path of each file of checkpoint `name`, which lies at `source`, by the name it was written under.

    Raises Damaged if anything differs from what was written, ValueError if another version of the format was.
    """
    manifest = _manifest(storage, name, source)
    folder = storage.folder_for(source)
    paths = {}
    for file, entry in manifest.items():
        paths[file] = os.path.join(folder, *file.split("/"))
        try:
            storage.fetch(source, file, paths[file])
        except FileNotFoundError:
            raise Damaged(file, "is missing") from None
        _verify(file, paths[file], entry)
    return paths


def _manifest(storage: Storage, name: str, source: str) -> dict[str, dict[str, Any]]:
    """The checked entries {file: {"size", "sha256"}} of a checkpoint's manifest."""
    content = {}
    for file in (COMMITTED, MANIFEST):
        try:
            content[file] = storage.read(f"{source}/{file}")
        except FileNotFoundError:
            end = ": it was never finished" if file == COMMITTED else ""
            raise Damaged(file, f"is missing{end}") from None
    if content[COMMITTED] != commit_text(content[MANIFEST]):
        raise Damaged(MANIFEST, f"does not match the hash in {COMMITTED}")
    manifest = json.loads(content[MANIFEST])
    if manifest["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint {name} in {storage.dir} has format {manifest['format_version']};"
            f" this version of rollover reads {FORMAT_VERSION}. Use the version of rollover that wrote it."
        )
    for file in manifest["files"]:
        if not is_plain_name(file):
            raise Damaged(MANIFEST, f"names a file outside the checkpoint: {file!r}")
    return manifest["files"]


def _verify(file: str, path: str, entry: Mapping[str, Any]) -> None:
    if not os.path.isfile(path):
        raise Damaged(file, "is missing")
    found = os.path.getsize(path)
    if found != entry["size"]:
        raise Damaged(file, f"has {found} bytes instead of {entry['size']}")
    if fingerprint(path)["sha256"] != entry["sha256"]:
        raise Damaged(file, "has other content than was written (SHA-256 differs)")
