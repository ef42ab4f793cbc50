"""What the file system says: where nothing can be written, which path was meant, who may read what was written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from rollover.files import (
    atomic_write_text,
    check_output_file,
    check_writable,
    did_you_mean_path,
    give_usual_mode,
    near_paths,
)


class ReadOnly(MemoryFileSystem):
    """A store that can be read and not written."""

    protocol = "readonly"

    def pipe_file(self, *args: object, **kwargs: object) -> None:
        raise PermissionError("AccessDenied")


def test_a_place_that_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for where in (tmp_path / "there", tmp_path / "not" / "yet", f"file://{tmp_path}/there", "memory://probe/new"):
        check_writable(where, "checkpoint.dir")
    assert os.listdir(tmp_path) == ["there"] and os.listdir(tmp_path / "there") == []


@pytest.mark.parametrize("below", ["", "x/y"])
def test_what_is_no_folder_cannot_be_written_to(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" / below
    with pytest.raises(ValueError) as error:
        check_writable(where, "checkpoint.dir")
    assert str(error.value) == (
        f"checkpoint.dir = {str(where)!r} cannot be written to: Not a directory ({tmp_path / 'file'})."
        " Give another place"
    )


def test_a_remote_store_is_tried_too() -> None:
    register_implementation("readonly", ReadOnly, clobber=True)
    with pytest.raises(ValueError, match=r"^checkpoint.dir = 'readonly://runs/1' cannot be .*PermissionError: AccessD"):
        check_writable("readonly://runs/1", "checkpoint.dir")


def test_an_output_file_needs_its_folder(tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    check_output_file(tmp_path / "plots" / "a.svg", "--svg")
    with pytest.raises(ValueError, match=rf"--svg .*: there is no folder .*plot\. Did you mean {tmp_path}/plots\?"):
        check_output_file(tmp_path / "plot" / "a.svg", "--svg")
    with pytest.raises(ValueError, match="is a folder: give the name of a file in it"):
        check_output_file(tmp_path / "plots", "--svg")
    with pytest.raises(ValueError, match=r"--svg /proc/a\.svg cannot be written: No such file or directory \(/proc\)"):
        check_output_file(Path("/proc/a.svg"), "--svg")


def test_a_near_path_has_its_first_missing_part_put_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "math").mkdir(parents=True)
    for name in ("train.jsonl", "train.txt", "zoo.jsonl"):
        (tmp_path / "data" / "math" / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert near_paths("data/math/trian.jsonl", (".jsonl",)) == ["data/math/train.jsonl"]
    assert near_paths("data/math/trian.jsonl") == ["data/math/train.jsonl", "data/math/train.txt"]
    assert near_paths("dta/math/train.jsonl") == ["data/math/train.jsonl"]
    assert near_paths("dta/math/other.jsonl") == []
    assert did_you_mean_path("data/math/zo.jsonl") == ". Did you mean data/math/zoo.jsonl?"
    assert did_you_mean_path("/nowhere/at/all") == ". Check the path"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_the_usual_mode_follows_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    path = tmp_path / "model.safetensors"
    path.touch(0o600)
    before = os.umask(umask)
    try:
        give_usual_mode(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode and os.listdir(tmp_path) == [path.name]


def test_atomic_write_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    atomic_write_text(path, "one\n")
    atomic_write_text(str(path), "zwei ü\n")
    assert path.read_text(encoding="utf-8") == "zwei ü\n"
    assert os.listdir(tmp_path) == ["config.json"]
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "zwei ü\n" and os.listdir(tmp_path) == ["config.json"]


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    """As /dev/null, which root would otherwise have replaced by a report."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        atomic_write_text(pipe, "told")
        assert pipe.is_fifo() and os.read(reader, 100) == b"told" and os.listdir(tmp_path) == ["pipe"]
    finally:
        os.close(reader)
