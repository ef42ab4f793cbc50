"""Every way of weights brings an engine the weights that were sent, whatever happens to the trainer's afterwards."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.full_disk import full_above
from heard import hear
from rollover.engine.embedded.runner import WeightWriter
from rollover.weights import WeightUpdate
from rollover.weights.safetensors_stream import WholeFile, mapped
from rollover.weights.shared_file import SharedFile
from rollover.weights.weights_file import LockedFolder, WeightsFile


class Model(torch.nn.Module):
    """An engine's: in this process, as a transport that writes in place needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, 5)
        self.down = torch.nn.Linear(5, 3, bias=False).to(torch.bfloat16)
        self.same = self.down  # tied
        self.adapter = Adapter()


class Adapter:
    """Holds a weight of its own, and derives another from it."""

    value = derived = torch.zeros(())

    def load(self, name: str, tensor: torch.Tensor) -> int | None:
        if name != "adapter":
            return None
        self.value = tensor.clone()
        return tensor.nbytes

    def refresh(self) -> None:
        self.derived = 2 * self.value


class Engine:
    """The other end, in another process: all weights that it has, by name."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def take(self, update: WeightUpdate) -> None:
        """The message travels as JSON."""
        message = json.loads(json.dumps(update.message))
        assert message["version"] == update.version
        received = mapped(message["path"]) if "path" in message else SharedFile.read(message)
        self.weights |= {name: tensor.clone() for name, tensor in received}


def weights(factor: float = 1.0) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "up.weight": torch.randn(5, 3) * factor,
        "up.bias": torch.randn(5) * factor,
        "down.weight": (torch.randn(3, 5) * factor).to(torch.bfloat16),
        "adapter": torch.randn(()) * factor,
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]) for name, tensor in expected.items()
    )


def size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.fixture(params=[SharedFile, WeightsFile])
def ends(request: pytest.FixtureRequest) -> Iterable[tuple[SharedFile | WeightsFile, Engine]]:
    hear(pytest.fail)
    transport = request.param()
    yield transport, Engine()
    transport.close()


def test_what_was_sent_arrives_and_is_the_trainers_no_more(ends: tuple[SharedFile | WeightsFile, Engine]) -> None:
    transport, engine = ends
    mine = weights()
    update = transport.write(1, mine.items())
    assert (update.version, update.num_bytes) == (1, size(mine.values()))
    for tensor in mine.values():  # the trainer goes on
        tensor.zero_()
    engine.take(update)
    assert same(engine.weights, weights())


def test_a_later_version_may_be_of_some_weights_only(ends: tuple[SharedFile | WeightsFile, Engine]) -> None:
    """As with LoRA: all of them once, then adapters alone. An engine that begins anew gets the newest of each."""
    transport, engine = ends
    engine.take(transport.write(1, weights().items()))
    changed = {name: weights(2.0)[name] for name in ("up.bias", "adapter")}
    update = transport.write(7, iter(changed.items()))
    assert (update.version, update.num_bytes) == (7, size(changed.values()))
    engine.take(update)
    assert same(engine.weights, weights() | changed)
    everything, anew = transport.full_update(), Engine()
    assert everything is not None and everything.version == 7
    anew.take(everything)
    assert same(anew.weights, weights() | changed)


def test_nothing_was_sent_yet(ends: tuple[SharedFile | WeightsFile, Engine]) -> None:
    assert ends[0].full_update() is None


def test_what_earlier_versions_needed_is_given_back(ends: tuple[SharedFile | WeightsFile, Engine]) -> None:
    transport, _ = ends
    sizes = set()
    for version in range(1, 6):
        update = transport.write(version, weights(version).items())
        file = update.message.get("file")
        sizes.add(0 if file is None else os.fstat(file).st_size)
    assert len(sizes) == 1
    transport.close()
    if file is not None:
        with pytest.raises(OSError):
            os.fstat(file)


def test_weight_writer_updates_weights_and_derived_tensors() -> None:
    model, mine = Model(), weights()
    transport = WeightWriter(model, [model.adapter])
    assert transport.write(mine.items()) == size(mine.values())
    for tensor in mine.values():  # the trainer goes on
        tensor.zero_()
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert same(found | {"adapter": model.adapter.value}, weights())
    transport.write([("adapter", torch.tensor(3.0)), ("same.weight", torch.ones(3, 5))])
    assert (
        model.adapter.derived == 6 and (model.down.weight == 1).all() and torch.equal(model.up.bias, found["up.bias"])
    )
    with pytest.raises(AssertionError, match="the engine's model has no parameter up.scale"):
        transport.write([("up.scale", torch.ones(1))])


def test_a_file_that_grows_out_of_memory_takes_what_it_has_along(tmp_path: Path, monkeypatch) -> None:
    """And without room anywhere it says what to do."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = hear([])
    transport, engine = SharedFile(), Engine()
    transport.reserve([1000])
    transport.write(1, [("a", torch.arange(100))])
    full_above(monkeypatch, "/dev/shm", 1000)
    transport.write(2, [("b", torch.ones(300))])
    assert len(said) == 1
    everything = transport.full_update()
    assert everything is not None
    engine.take(everything)
    assert same(engine.weights, {"a": torch.arange(100), "b": torch.ones(300)})
    full_above(monkeypatch, "/", 10_000)
    with pytest.raises(ValueError, match=r"room for \S+ MB of weights in .*TMPDIR.*engine.kind = embedded"):
        transport.write(3, [("c", torch.ones(10_000))])
    transport.close()


def test_a_weight_of_another_shape_is_refused() -> None:
    transport = SharedFile()
    transport.write(1, [("a", torch.ones(3))])
    with pytest.raises(AssertionError, match="a has changed its shape or dtype"):
        transport.write(2, [("a", torch.ones(4))])
    transport.close()


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"), key=lambda path: int(path.stem.split(".")[1]))


def test_weights_file_has_all_weights_and_keeps_the_last_two(tmp_path: Path) -> None:
    hear(pytest.fail)
    transport = WeightsFile(str(tmp_path))
    transport.write(1, weights().items())
    for version in (2, 3):
        update = transport.write(version, [("up.bias", torch.full((5,), float(version)))])
    assert [path.stem for path in files_of(tmp_path)] == ["2.2", "3.3"]
    path = Path(update.message["path"])
    assert path == files_of(tmp_path)[-1] and path.is_absolute()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == update.message["sha256"]
    found = load_file(path)
    assert found.keys() == weights().keys() and (found["up.bias"] == 3).all()
    assert not list(tmp_path.glob("*/*.part"))
    transport.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_weights_that_are_in_a_file_already_are_not_written_again(links: bool, tmp_path: Path, monkeypatch) -> None:
    """Unless they lie on another disk. What was sent before is in none of them."""

    def refuse(*paths: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    whole = WholeFile(tmp_path / "whole.safetensors")
    save_file({"a": torch.arange(4.0), "b": torch.ones(2)}, whole.path)
    transport = WeightsFile(str(tmp_path / "folder"))
    transport.write(1, [("a", torch.zeros(4)), ("b", torch.zeros(2))])
    update = transport.write(2, whole)
    path = Path(update.message["path"])
    assert os.path.samefile(path, whole.path) == links and update.num_bytes == 24
    assert hashlib.sha256(path.read_bytes()).hexdigest() == update.message["sha256"]
    whole.path.unlink()
    assert load_file(path)["a"].tolist() == [0, 1, 2, 3]
    changed = load_file(transport.write(3, [("b", torch.zeros(2))]).message["path"])
    assert changed["a"].tolist() == [0, 1, 2, 3] and changed["b"].tolist() == [0, 0]
    transport.close()


KILLED_OWNER = """
import os, signal, sys, torch
from rollover.process_tree import descendants, kill
from rollover.weights.weights_file import WeightsFile
transport = WeightsFile(sys.argv[1])
transport.write(1, [("a", torch.ones(3))])
kill(descendants(os.getpid()) if sys.argv[2:] else [])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_weights_files_are_removed_when_their_owner_is_killed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_OWNER, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, list(tmp_path.rglob("*"))
        time.sleep(0.01)


def test_orphaned_weights_folders_are_removed_by_the_next_owner(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED_OWNER, str(tmp_path), "all"], check=False)
    (left,) = files_of(tmp_path)
    lives, other = (WeightsFile(str(tmp_path)) for _ in range(2))
    lives.write(1, [("a", torch.ones(3))])
    other.write(1, [("a", torch.ones(3))])
    assert not left.exists() and len(files_of(tmp_path)) == 2
    lives.close()
    other.close()


def test_concurrent_owners_keep_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that start at one moment: one looks for what is left of others before the other one has its lock."""
    lock, others = fcntl.flock, []

    def flock(file: IO[bytes], how: int) -> None:
        if how == fcntl.LOCK_EX and not others:
            others.append(WeightsFile(str(tmp_path)))
            others[0].write(1, [("a", torch.ones(3))])
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    transport = WeightsFile(str(tmp_path))
    update = transport.write(1, [("a", torch.ones(3))])
    assert Path(update.message["path"]).exists() and len(files_of(tmp_path)) == 2
    for each in (transport, *others):
        each.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_without_room_in_memory_is_elsewhere_and_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = hear([])
    folder = LockedFolder("")
    assert folder.path(10**15).parent == tmp_path
    assert len(said) == 1 and "no room for" in said[0] and str(tmp_path) in said[0]
    folder.close()


def test_a_weights_file_that_cannot_be_written_names_the_option(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(LockedFolder, "path", lambda self, num_bytes: tmp_path / "gone")
    with pytest.raises(ValueError, match="engine.weights_dir"):
        WeightsFile(str(tmp_path)).write(1, [("a", torch.ones(3))])
