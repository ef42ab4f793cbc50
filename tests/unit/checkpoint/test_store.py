"""CheckpointStore: a checkpoint is committed and complete, or invisible, whatever happens to the writer."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import uuid
from pathlib import Path

import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.checkpoint.storage import checkpoint_name, checkpoint_step
from rollover.checkpoint.store import CheckpointStore, CheckpointWriteError, CorruptCheckpointError

FILES = {"trainer.safetensors": b"weights" * 100, "cache/segments.bin": bytes(range(256)), "empty": b""}


def contents(store: CheckpointStore, name: str) -> dict[str, bytes]:
    return {file: Path(path).read_bytes() for file, path in store.open(name).items()}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "checkpoints"), keep=2)


@pytest.mark.parametrize("dir", ["of/a/run/", "../here/of/a/run", "missing/../of/a/run"])
def test_relative_path_begins_in_start_folder(dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    opened = CheckpointStore(dir, keep=2)
    monkeypatch.chdir(tmp_path)
    opened.write("step-000010", FILES)
    assert contents(opened, "step-000010") == FILES
    assert CheckpointStore(str(tmp_path / "here" / "of" / "a" / "run"), keep=2).list() == ["step-000010"]


def test_keeps_the_newest_by_step(store: CheckpointStore) -> None:
    for step in (5, 10, 999_999, 1_000_000):
        store.write(checkpoint_name(step), {"a": str(step).encode()})
    assert store.list() == ["step-999999", "step-1000000"]
    assert sorted(os.listdir(store.dir)) == ["step-1000000", "step-999999"]


@pytest.mark.parametrize("place", ["store", "remote"])
def test_one_is_kept_beside_the_newest_until_another_is(place: str, request: pytest.FixtureRequest) -> None:
    store: CheckpointStore = request.getfixturevalue(place)
    store.protect("step-000010")  # before it is there
    for step in (10, 20, 30, 40):
        store.write(checkpoint_name(step), {"a": str(step).encode()})
    assert store.list() == ["step-000010", "step-000030", "step-000040"]
    assert contents(store, "step-000010") == {"a": b"10"}
    store.protect("step-000030")
    assert store.list() == ["step-000030", "step-000040"], "one of the newest: the former goes at once"
    for step in (50, 60):
        store.write(checkpoint_name(step), FILES)
    assert store.list() == ["step-000030", "step-000050", "step-000060"]


def test_write_after_resuming_an_earlier_one_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), keep=3)
    for step in (10, 20, 30):
        store.write(checkpoint_name(step), FILES)
    narrow = CheckpointStore(str(tmp_path), keep=1)
    narrow.write("step-000015", FILES)
    assert narrow.list() == ["step-000015", "step-000020", "step-000030"]
    narrow.discard_after("step-000015")
    assert narrow.list() == ["step-000015"]


def test_replaces_a_checkpoint_of_the_same_name(store: CheckpointStore) -> None:
    store.write("step-000010", {"a": b"old", "only-old": b""})
    store.write("step-000010", {"a": b"new"})
    assert contents(store, "step-000010") == {"a": b"new"}
    assert os.listdir(store.dir) == ["step-000010"]


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_leftovers_are_removed_despite_reused_pid(store: CheckpointStore) -> None:
    """One process writes at a time, so they are of a dead one, whose id another may have by now."""
    for pid in (dead_pid(), os.getpid(), os.getppid()):
        os.makedirs(f"{store.dir}/.tmp-step-000001-{pid}/x")
    store.write("step-000002", FILES)
    assert os.listdir(store.dir) == ["step-000002"]


def test_old_entry_is_discarded_despite_reused_pid(store: CheckpointStore) -> None:
    for step in (10, 20):
        store.write(checkpoint_name(step), FILES)
    os.rename(f"{store.dir}/step-000020", f"{store.dir}/.old-step-000020-{os.getppid()}")
    assert store.list() == ["step-000010", "step-000020"]
    store.discard_after("step-000010")
    assert store.list() == os.listdir(store.dir) == ["step-000010"]


# ---- corruption: each refused by name, the previous one offered


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        ("trainer.safetensors", flip_byte, "SHA-256 differs"),
        ("trainer.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-1]), "has 699 bytes instead of 700"),
        ("cache/segments.bin", Path.unlink, "is missing"),
        ("manifest.json", flip_byte, "does not match"),
        ("manifest.json", Path.unlink, "is missing"),
        ("COMMITTED", Path.unlink, "never finished"),
    ],
)
def test_corruption_is_refused_and_the_previous_offered(
    store: CheckpointStore, file: str, damage, problem: str
) -> None:
    store.write("step-000010", FILES)
    store.write("step-000020", FILES)
    damage(Path(store.dir, "step-000020", file))
    with pytest.raises(CorruptCheckpointError) as caught:
        store.open("step-000020")
    message = str(caught.value)
    assert "checkpoint step-000020" in message and file in message and problem in message
    assert "--checkpoint.resume_from step-000010" in message
    assert contents(store, "step-000010") == FILES


def test_corruption_without_an_earlier_one(store: CheckpointStore) -> None:
    store.write("step-000010", FILES)
    flip_byte(Path(store.dir, "step-000010", "trainer.safetensors"))
    with pytest.raises(CorruptCheckpointError, match="no earlier checkpoint: start again without --resume"):
        store.open("step-000010")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_changed_byte_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    store = CheckpointStore(str(tmp_path_factory.mktemp("c")), keep=1)
    store.write("step-000010", FILES)
    files = sorted(p for p in Path(store.dir, "step-000010").rglob("*") if p.is_file() and p.stat().st_size)
    path = data.draw(st.sampled_from(files))
    content = bytearray(path.read_bytes())
    index = data.draw(st.integers(0, len(content) - 1))
    content[index] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        store.open("step-000010")


def test_unknown_checkpoint_names_the_known(store: CheckpointStore) -> None:
    store.write("step-000010", FILES)
    with pytest.raises(ValueError, match=r"resume_from: there is no checkpoint 'step-000011'.*There are: step-000010"):
        store.open("step-000011")
    with pytest.raises(ValueError, match="checkpoint.resume_from: '../etc' is not the name"):
        store.open("../etc")


def test_a_manifest_cannot_point_outside(store: CheckpointStore) -> None:
    store.write("step-000010", FILES)
    folder = Path(store.dir, "step-000010")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../../evil"] = {"size": 0, "sha256": ""}
    text = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "COMMITTED").write_text(hashlib.sha256(text).hexdigest() + "\n")
    with pytest.raises(CorruptCheckpointError, match="outside the checkpoint"):
        store.open("step-000010")


def test_a_newer_format_is_refused(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollover.checkpoint.storage.FORMAT_VERSION", 2)
    store.write("step-000010", FILES)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has format 2"):
        store.open("step-000010")


def test_names_are_steps() -> None:
    assert checkpoint_name(20) == "step-000020" and checkpoint_step("step-000020") == 20
    with pytest.raises(ValueError, match="step-000020"):
        checkpoint_step("final")


# ---- failing writes


def test_failing_writer_of_torch_leaves_the_earlier_checkpoints(store: CheckpointStore) -> None:
    """It raises a RuntimeError where the disk is full."""
    store.write("step-000010", FILES)

    def fail(path: str) -> None:
        Path(path).write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    with pytest.raises(CheckpointWriteError) as caught:
        store.write("step-000020", {"a": b"written", "b": fail})
    message = str(caught.value)
    assert all(part in message for part in ("step-000020", store.dir, "bytes free", "PytorchStreamWriter"))
    assert os.listdir(store.dir) == ["step-000010"] and contents(store, "step-000010") == FILES


# ---- remote


def test_our_own_bugs_are_not_called_write_errors(store: CheckpointStore) -> None:
    def fail(path: str) -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        store.write("step-000010", {"a": fail})
    assert os.listdir(store.dir) == []


@pytest.fixture
def remote() -> CheckpointStore:
    return CheckpointStore(f"memory://bucket-{uuid.uuid4().hex}/run", keep=2)


def behind(store: CheckpointStore) -> tuple[MemoryFileSystem, str]:
    """The file system of the store, and its folder there."""
    return url_to_fs(store.dir)


def test_remote_replacement_that_fails_leaves_the_former(remote: CheckpointStore) -> None:
    remote.write("step-000010", FILES)

    def fail(path: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointWriteError, match="Earlier checkpoints are untouched"):
        remote.write("step-000010", {"a": b"uploaded", "b": fail})
    assert remote.list() == ["step-000010"] and contents(remote, "step-000010") == FILES
    for text in (b"second", b"third"):
        remote.write("step-000010", {"a": text})
        assert remote.list() == ["step-000010"] and contents(remote, "step-000010") == {"a": text}
    remote.write("step-000020", FILES)
    remote.write("step-000030", FILES)
    assert remote.list() == ["step-000020", "step-000030"]
    remote.write("step-000030", FILES)
    remote.discard_after("step-000020")
    assert remote.list() == ["step-000020"]


def test_remote_replacement_that_is_killed_leaves_the_former(
    remote: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last moment: all files are uploaded, the marker is not."""
    remote.write("step-000010", FILES)
    plain = MemoryFileSystem.pipe_file

    def killed(self: object, path: str, value: bytes) -> None:
        if path.endswith("COMMITTED"):
            monkeypatch.setattr(MemoryFileSystem, "rm", lambda *args, **options: None)
            raise KeyboardInterrupt
        plain(self, path, value)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", killed)
    with pytest.raises(KeyboardInterrupt):
        remote.write("step-000010", {"a": b"new"})
    monkeypatch.undo()
    assert remote.list() == ["step-000010"] and contents(remote, "step-000010") == FILES
    remote.write("step-000010", {"a": b"new"})
    assert contents(remote, "step-000010") == {"a": b"new"}


class Unavailable(Exception):
    """As gcsfs's HttpError: no OSError."""


def unavailable(*args: object, **options: object) -> None:
    raise Unavailable("503: try again")


@pytest.mark.parametrize("method", ["put_file", "pipe_file", "makedirs"])
def test_remote_errors_that_are_no_os_errors(
    remote: CheckpointStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    remote.write("step-000010", FILES)
    monkeypatch.setattr(MemoryFileSystem, method, unavailable)
    with pytest.raises(CheckpointWriteError, match="step-000020 could not be written .* Unavailable: 503: try again"):
        remote.write("step-000020", FILES)
    monkeypatch.undo()
    assert remote.list() == ["step-000010"] and contents(remote, "step-000010") == FILES


@pytest.mark.parametrize("method", ["info", "ls", "cat_file", "get_file"])
def test_silent_remote_store_is_an_error(remote: CheckpointStore, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    remote.write("step-000010", FILES)
    monkeypatch.setattr(MemoryFileSystem, method, unavailable)
    with pytest.raises(ValueError, match=r"^checkpoint.dir = 'memory://.*' cannot be read: Unavailable: 503: try ag"):
        remote.open(remote.list()[-1])


@pytest.mark.parametrize("method", ["rm", "rm_file"])
def test_undeletable_remote_checkpoint_does_not_fail_the_write(
    remote: CheckpointStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    for step in (10, 20):
        remote.write(checkpoint_name(step), FILES)
    monkeypatch.setattr(MemoryFileSystem, method, unavailable)
    with pytest.warns(UserWarning, match="step-000010 in .* could not be deleted: 503"):
        remote.write("step-000030", FILES)
    assert remote.list()[-1] == "step-000030"


def test_remote_corruption(remote: CheckpointStore) -> None:
    remote.write("step-000010", FILES)
    remote.write("step-000020", FILES)
    fs, root = behind(remote)
    fs.pipe_file(f"{root}/step-000020/trainer.safetensors", b"short")
    with pytest.raises(CorruptCheckpointError, match="trainer.safetensors has 5 bytes.*resume_from step-000010"):
        remote.open("step-000020")
    fs.rm_file(f"{root}/step-000020/trainer.safetensors")
    with pytest.raises(CorruptCheckpointError, match="trainer.safetensors is missing"):
        remote.open("step-000020")


def test_file_url_is_local(tmp_path: Path) -> None:
    store = CheckpointStore(f"file://{tmp_path}/c", keep=1)
    store.write("step-000010", FILES)
    assert store.open("step-000010")["empty"] == f"{tmp_path}/c/step-000010/empty"


@pytest.mark.parametrize("url", ["nosuch://bucket/x"])
def test_unusable_url_names_the_field(url: str) -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.dir: cannot use 'nosuch"):
        CheckpointStore(url, keep=1)


@pytest.mark.parametrize("file", ["manifest.json", "COMMITTED"])
def test_pipe_in_place_of_a_file_is_refused(store: CheckpointStore, file: str) -> None:
    store.write("step-000010", FILES)
    (place,) = Path(store.dir).glob(f"step-000010/{file}")
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(ValueError, match=f"{file} is no file"):
        store.open("step-000010")
