"""A weights file is the one that was meant, or it is refused with the reason; unchanged files are hashed once."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollover.weights.verifier import Verifier, shapes_of

MODEL_BYTES = 2 * 3 * 4 + 4 * 2
REFUSED = (
    "refused: {} is not there for this server, or not the weights file with that SHA-256. Does this machine see the"
    " folder that it was written to? The server's log has the reason"
)


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
    sha256, verifier = written(path), Verifier(MODEL_BYTES)
    assert settled(verifier, path, sha256) == "verified"
    verifier.verify(str(path), sha256.upper())
    assert shapes_of(str(path)) == {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}


def test_another_file_is_refused_and_a_mended_one_is_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, verifier = tmp_path / "w.safetensors", Verifier(MODEL_BYTES)
    sha256 = written(path)
    written(path, 2.0)
    assert settled(verifier, path, sha256) == REFUSED.format(path)
    with pytest.raises(ValueError, match="not the weights file with that SHA-256"):
        verifier.verify(str(path), sha256)
    said = capfd.readouterr().err
    assert said.count(f"weights refused: '{path}': it has another SHA-256") == 2, "for the owner of the server"
    assert hashlib.sha256(path.read_bytes()).hexdigest() not in said
    assert written(path) == sha256
    verifier.verify(str(path), sha256)


def test_a_file_that_could_not_be_read_once_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a network's folder: a call after a refusal begins anew, as weights that are refused come again."""
    path, verifier = tmp_path / "w.safetensors", Verifier(MODEL_BYTES)
    sha256, fails = written(path), [True]
    digest = hashlib.file_digest

    def fail_once(file, name):  # noqa: ANN001, ANN202
        if fails and fails.pop():
            raise OSError(5, "Input/output error")
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", fail_once)
    assert settled(verifier, path, sha256) == REFUSED.format(path)
    assert settled(verifier, path, sha256) == "verified"


@pytest.mark.parametrize("name", ["none.safetensors", "a\0b"])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    path, verifier = tmp_path / name, Verifier(MODEL_BYTES)
    assert settled(verifier, path, "00") == REFUSED.format(path)
    with pytest.raises(ValueError, match="Does this machine see the folder"):
        verifier.verify(str(path), "00")


def test_an_unchanged_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, verifier = tmp_path / "w.safetensors", Verifier(MODEL_BYTES)
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


def kinds(tmp_path: Path) -> dict[str, str]:
    """Paths at which no regular file is, and what the server's log says of them."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(tmp_path / "socket"))
    other = "is no file, but a folder, a device or a pipe"
    names = [str(tmp_path), *(str(tmp_path / name) for name in ("pipe", "link", "socket")), "/dev/zero", "/dev/null"]
    return dict.fromkeys(names, other) | {"/proc/self/mem": "its header is longer than the file"}


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path, reason in kinds(tmp_path).items():
        verifier = Verifier(MODEL_BYTES)
        with pytest.raises(ValueError) as refused:
            verifier.verify(path, "0" * 64)
        assert f"refused: {refused.value}" == REFUSED.format(path)
        assert settled(verifier, Path(path), "0" * 64) == REFUSED.format(path)
        assert capfd.readouterr().err.count(reason) == 2, path


def test_what_is_no_path_is_refused() -> None:
    """A number would be a file that the server has open."""
    verifier = Verifier(MODEL_BYTES)
    for path in (0, None, ["x"], True):
        assert verifier.status(path, "0" * 64).startswith("refused: ")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="is not there for this server"):
            verifier.verify(path, "0" * 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not there for this server"):
        verifier.verify("/etc/passwd", 5)  # type: ignore[arg-type]


def test_whether_a_path_exists_is_not_told(tmp_path: Path) -> None:
    """Neither by the words nor by the first answer, nor by reading a file that holds no tensors."""
    (tmp_path / "there").write_bytes(b"x" * 100)
    (tmp_path / "closed").mkdir(mode=0)
    verifier = Verifier(MODEL_BYTES)
    for path in (tmp_path / "there", tmp_path / "none", tmp_path / "closed" / "x", tmp_path / "none" / "x"):
        assert verifier.status(str(path), "0" * 64) == "verifying"
        assert settled(verifier, path, "0" * 64) == REFUSED.format(path)


def test_a_file_of_more_bytes_than_the_model_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "w.safetensors", []
    sha256 = written(path)
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: read.append(args) or digest(*args))
    os.truncate(path, 2**40)  # sparse: no disk is needed for it
    with pytest.raises(ValueError, match="not the weights file"):
        Verifier(MODEL_BYTES).verify(str(path), sha256)
    assert not read


def test_a_file_that_is_read_too_slowly_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As over a network that has all but stopped."""
    path, verifier = tmp_path / "w.safetensors", Verifier(MODEL_BYTES, patience_s=0.05)
    sha256 = written(path)

    def for_ever(file: Any, name: str) -> Any:
        while True:
            file.readinto(bytearray(1))
            time.sleep(0.01)

    with monkeypatch.context() as patched:
        patched.setattr(hashlib, "file_digest", for_ever)
        assert settled(verifier, path, sha256) == REFUSED.format(path)
        with pytest.raises(ValueError, match="not the weights file"):
            verifier.verify(str(path), sha256)
    assert "takes too long" in capfd.readouterr().err
    verifier.verify(str(path), sha256)


def test_one_file_is_verified_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that names many costs one thread; the others wait for their turn."""
    paths = [tmp_path / f"{i}.safetensors" for i in range(5)]
    sums = [written(path, float(i)) for i, path in enumerate(paths)]
    verifier, may_continue, reading = Verifier(MODEL_BYTES), threading.Event(), []
    digest = hashlib.file_digest

    def wait(file: Any, name: Any) -> Any:
        reading.append(file)
        assert may_continue.wait(60)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", wait)
    before = threading.active_count()
    for _ in range(3):
        assert {verifier.status(str(path), sha256) for path, sha256 in zip(paths, sums, strict=True)} == {"verifying"}
    assert threading.active_count() <= before + 1 and len(reading) <= 1
    may_continue.set()
    for path, sha256 in zip(paths, sums, strict=True):
        assert settled(verifier, path, sha256) == "verified"


def test_a_verification_that_hangs_ends_the_wait_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a read that does not return, as on a disk that is gone."""
    path, verifier = tmp_path / "w.safetensors", Verifier(0, patience_s=-4.9)
    sha256, may_return = written(path), threading.Event()
    assert 0 < verifier.limit_s < 1
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: may_return.wait(60) and digest(*args))
    assert verifier.status(str(path), sha256) == "verifying"
    with pytest.raises(ValueError, match="another weights file is being verified"):
        verifier.verify(str(path), sha256)
    may_return.set()
