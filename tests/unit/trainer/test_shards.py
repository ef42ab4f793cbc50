"""State that ranks write together: read by any number of them and by one process, and the reverse, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from forked_ranks import RankError, Ranks
from rollover.checkpoint.store import CheckpointStore, CorruptCheckpointError
from rollover.trainer.backend import StoredTensors
from unit.trainer.shard_jobs import State, digests

Saved = tuple[CheckpointStore, dict[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks("unit.trainer.shard_jobs") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint of two ranks, what is in it, and what JSON holds."""
    store, told = CheckpointStore(str(tmp_path_factory.mktemp("saved")), keep=2), []
    store.write("step-000002", {}, [("trainer-", lambda folder: told.extend(ranks(2, "save", folder)))])
    (ours, meta), theirs = told
    assert theirs == [ours, meta]
    return store, ours, meta


def stored(store: CheckpointStore, name: str = "step-000002") -> list[str]:
    return list(store.open(name).values())


def test_each_rank_writes_its_slices_and_nothing_is_a_pickle(saved: Saved) -> None:
    store, written, _ = saved
    files = store.open("step-000002")
    kinds = ("exp_avg", "exp_avg_sq", "kept", "master")
    slices = {f"trainer-{kind}/shard-0000{rank}-model-00001-of-00001.safetensors" for kind in kinds for rank in (1, 2)}
    assert slices <= files.keys()
    assert len(files.keys() - slices) == 1, "random/cpu is of one rank"
    folder = Path(store.dir, "step-000002")
    lying = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert lying == files.keys() | {"manifest.json", "COMMITTED"}
    for path in files.values():
        with safetensors.safe_open(path, "pt"):
            pass
    assert "master/embed.weight" in written and "master/head.weight" not in written, "a tied weight is there once"


def test_they_are_read_by_one_rank_by_four_and_by_one_process(ranks: Ranks, saved: Saved) -> None:
    store, written, meta = saved
    assert digests(StoredTensors(stored(store))) == written
    alone = State(seed=5)
    alone.load(StoredTensors(stored(store)), meta)
    assert alone.digests() == written
    alone.train(seed=4)
    for world in (1, 4):
        for read, further in ranks(world, "load", stored(store), meta):
            assert read == written, f"{world} ranks"
            assert further.keys() == written.keys() and further != written
            if world == 1:
                assert further == alone.digests()


def test_a_rank_killed_while_it_writes_leaves_the_earlier_checkpoint(ranks: Ranks, saved: Saved) -> None:
    store, written, _ = saved
    lying: list[str] = []

    def write(folder: str) -> None:
        try:
            ranks(2, "save_and_be_killed", folder)
        finally:
            lying.extend(path.parent.name for path in Path(folder).rglob("*.safetensors"))

    with pytest.raises(RankError, match="rank 1: killed by 9"):
        store.write("step-000003", {}, [("trainer-", write)])
    assert "exp_avg" in lying and "master" not in lying, "it was in the middle"
    assert [path.name for path in Path(store.dir).iterdir()] == ["step-000002"]
    assert digests(StoredTensors(stored(store))) == written


def test_a_damaged_slice_is_refused(saved: Saved, tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), keep=2)
    files = {file: Path(path).read_bytes() for file, path in saved[0].open("step-000002").items()}
    store.write("step-000002", files)
    name = next(name for name in sorted(files) if name.startswith("trainer-master/"))
    damaged = tmp_path / "step-000002" / name
    damaged.write_bytes(files[name][:-1] + b"?")
    with pytest.raises(CorruptCheckpointError, match=f"step-000002.*{name} has other content"):
        store.open("step-000002")
    damaged.unlink()
    with pytest.raises(CorruptCheckpointError, match=f"step-000002.*{name} is missing"):
        store.open("step-000002")


def test_slices_that_make_no_whole_are_refused(saved: Saved) -> None:
    paths = [path for path in stored(saved[0]) if "trainer-master/shard-00001" not in path]
    with pytest.raises(ValueError, match="slices of master/.* do not make a tensor of shape"):
        StoredTensors(paths)


def test_tensors_without_dimensions_or_elements_are_stored(tmp_path: Path) -> None:
    tensors = {"a/scalar": torch.tensor(1.5), "a/none": torch.empty(0, 3), "a/bool": torch.tensor([True, False])}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    assert digests(StoredTensors([str(tmp_path / "a.safetensors")])) == digests(tensors)
