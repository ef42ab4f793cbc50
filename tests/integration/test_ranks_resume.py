"""A run goes on from its checkpoint with another number of ranks, or in one process, and the reverse."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
from endings import train

from rollover.checkpoint.store import CheckpointStore
from rollover.trainer.ranks.backend import RanksBackend
from rollover.trainer.ranks.group import LocalRanks

pytestmark = pytest.mark.slow

# All groups of a step are of its weights: what is sampled follows from them.
IN_ORDER = {"groups_per_step": 3, "group_size": 3, "in_flight_groups": 3, "interrupt": "never", "max_staleness": 0}
RANKS = {"type": "ranks", "num_ranks": 2}


def trained(folder: Path, **backend: Any) -> Path:
    """The folder of a run of two steps, which has a checkpoint."""
    recipe = runs.write(folder, steps=2, rollout=IN_ORDER, algorithm={"kl_coef": 0.01}, backend=backend)
    done = runs.rollover("train", recipe)
    assert done.returncode == 0, done.stderr
    return folder


def goes_on(folder: Path, name: str, *words: str) -> list[dict[str, Any]]:
    """The rows of two more steps, in a copy of the run."""
    copy = folder.parent / name
    shutil.copytree(folder / "run", copy)
    options = ("--resume", f"--run.dir={copy}", "--train.num_steps=4", *words)
    done = runs.rollover("train", folder / "recipe.toml", *options)
    assert done.returncode == 0, done.stderr
    return runs.json_lines(copy / "metrics.jsonl")[2:]


def assert_alike(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Of two steps each. Sums are in another order, by which a token of the second may be another."""
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == [3, 4]
    for key in ("tokens/generated", "reward/mean"):
        assert ours[0][key] == theirs[0][key], key
    for key in ("loss", "grad_norm"):
        assert ours[0][key] == pytest.approx(theirs[0][key], rel=1e-3, abs=1e-6), key


def test_ranks_and_one_process_go_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    of_ranks, alone = trained(tmp_path / "ranks", **RANKS), trained(tmp_path / "alone")
    names = {path.name for path in (of_ranks / "run" / "checkpoints" / "step-000002" / "trainer-master").iterdir()}
    assert names == {f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)}
    files = [p for p in (of_ranks / "run" / "checkpoints").rglob("*") if p.is_file() and p.name != "COMMITTED"]
    assert {path.suffix for path in files} == {".safetensors", ".json"}

    expected = goes_on(of_ranks, "two")
    assert_alike(goes_on(of_ranks, "four", "--backend.num_ranks=4"), expected)
    assert_alike(goes_on(of_ranks, "one", "--backend.type=local"), expected)
    assert_alike(goes_on(alone, "alone again"), expected)
    assert_alike(goes_on(alone, "two again", "--backend.type=ranks", "--backend.num_ranks=2"), expected)


def test_checkpoints_of_ranks_are_uploaded_and_fetched(tmp_path: Path) -> None:
    """By way of a folder of the run, in which nothing is left."""
    remote = {"dir": f"objects://{tmp_path / 'store'}"}
    recipe = runs.write(tmp_path, steps=2, rollout=IN_ORDER, checkpoint=remote, backend=RANKS)
    script = Path(__file__).with_name("with_objects.py")
    done = runs.rollover("train", recipe, script=script)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "run")  # its machine is lost
    done = runs.rollover("train", recipe, "--resume", "--train.num_steps=3", script=script)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in runs.json_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert not list((tmp_path / "run" / "on_their_way").iterdir())


def test_a_rank_that_is_killed_while_a_checkpoint_is_written_costs_that_checkpoint_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it is whole, and the run goes on from there."""
    recipe = runs.write(tmp_path, steps=4, rollout=IN_ORDER, checkpoint={"every_steps": 1, "keep": 2}, backend=RANKS)
    save_shards, left = RanksBackend.save_checkpoint, list[list[str]]()
    store = CheckpointStore(str(tmp_path / "run" / "checkpoints"), keep=2)

    def save_and_kill(backend: RanksBackend) -> tuple[Callable[[str], None], dict[str, Any]]:
        write, meta = save_shards(backend)

        def killed(folder: str) -> None:
            if meta["policy_version"] == 2 and not left:
                assert isinstance(backend.ranks, LocalRanks)
                os.kill(backend.ranks.pids[1], signal.SIGKILL)
                try:
                    write(folder)
                finally:
                    left.append(store.list())
            else:
                write(folder)

        return killed, meta

    monkeypatch.setattr(RanksBackend, "save_checkpoint", save_and_kill)
    code, text = train(capsys, recipe)
    assert code == 0, text
    assert left == [["step-000001"]] and "rank 1 of 2 was killed by SIGKILL" in text, text
    assert [row["step"] for row in runs.json_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert store.list() == ["step-000003", "step-000004"]
    for name in store.list():
        store.open(name)
    runs.trace(tmp_path / "run")
