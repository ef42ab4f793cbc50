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
    assert [row["step"] for row in runs.rows(tmp_path)] == [1, 2, 3]
    assert not list((tmp_path / "run" / "on_their_way").iterdir())


def test_rank_killed_in_a_checkpoint_costs_it_alone(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [row["step"] for row in runs.rows(tmp_path)] == [1, 2, 3, 4]
    assert store.list() == ["step-000003", "step-000004"]
    for name in store.list():
        store.open(name)
    runs.trace(tmp_path / "run")
