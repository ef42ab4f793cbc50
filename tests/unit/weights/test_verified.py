"""A weights file is the one that was meant, or it is refused with the reason; unchanged files are hashed once."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollover.weights.verified import Verifier, shapes_of


def written(path: Path, value: float = 1.0) -> str:
    """A file with two tensors; its SHA-256."""
    save_file({"a": torch.full((2, 3), value), "b": torch.ones(4, dtype=torch.bfloat16)}, path, {"format": "pt"})
    return hashlib.sha256(path.read_bytes()).hexdigest()


def settled(verifier: Verifier, path: Path, sha256: str) -> str:
    deadline = time.monotonic() + 60
    while (found := verifier.status(str(path), sha256)) == "verifying" and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def test_the_file_that_was_meant_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    sha256, verifier = written(path), Verifier()
    assert settled(verifier, path, sha256) == "verified"
    verifier.verify(str(path), sha256.upper())
    assert shapes_of(str(path)) == {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}


def test_another_file_is_refused_with_the_reason_and_a_mended_one_is_taken(tmp_path: Path) -> None:
    path, verifier = tmp_path / "w.safetensors", Verifier()
    sha256 = written(path)
    written(path, 2.0)
    assert settled(verifier, path, sha256).startswith(f"refused: {path} is damaged: it has the SHA-256 ")
    with pytest.raises(ValueError, match="is damaged"):
        verifier.verify(str(path), sha256)
    assert written(path) == sha256
    verifier.verify(str(path), sha256)


def test_a_file_that_could_not_be_read_once_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a network's folder: a call after a refusal begins anew, as weights that are refused come again."""
    path, verifier = tmp_path / "w.safetensors", Verifier()
    sha256, fails = written(path), [True]
    digest = hashlib.file_digest

    def fail_once(file, name):  # noqa: ANN001, ANN202
        if fails and fails.pop():
            raise OSError(5, "Input/output error")
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", fail_once)
    assert settled(verifier, path, sha256) == f"refused: {path}: Input/output error"
    assert settled(verifier, path, sha256) == "verified"


@pytest.mark.parametrize("name", ["none.safetensors", "a\0b"])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    path, verifier = tmp_path / name, Verifier()
    assert verifier.status(str(path), "00").startswith("refused: ")
    with pytest.raises(ValueError, match="Does this machine see the folder"):
        verifier.verify(str(path), "00")


def test_an_unchanged_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, verifier = tmp_path / "w.safetensors", Verifier()
    sha256, hashed = written(path), []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: hashed.append(args) or digest(*args))
    for _ in range(3):
        verifier.verify(str(path), sha256)
        assert settled(verifier, path, sha256) == "verified"
    assert len(hashed) == 1
    os.utime(path, ns=(1, 1))  # as if it had been written again
    verifier.verify(str(path), sha256)
    assert len(hashed) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        (2**40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"\xff\xfe{}",
        (11).to_bytes(8, "little") + json.dumps({"a": None}).encode() + b" ",
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no safetensors file"):
        shapes_of(str(path))


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        shapes_of(str(tmp_path / "none"))
