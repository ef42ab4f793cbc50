"""DESIGN test 5: SIGKILL at random moments of a real run. Nothing of a checkpoint is lost, nothing is done twice."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import runs
import safetensors.numpy

from rollover.checkpoint.store import CheckpointStore, checkpoint_step
from rollover.rollout.cache import RolloutCache
from rollover.rollout.ledger import Ledger


def held_at(run_dir: Path) -> tuple[int, RolloutCache, dict]:
    """(step, held rollouts, state) of the newest checkpoint, read as a resumed run reads it."""
    store = CheckpointStore(str(run_dir / "checkpoints"), keep=2)
    name = store.list()[-1]
    files = store.open(name)
    state = json.loads(Path(files["state.json"]).read_text())
    cache = RolloutCache(48)
    cache.load_state_dict(state["cache"], safetensors.numpy.load_file(files["rollouts.safetensors"]))
    return checkpoint_step(name), cache, state


def check_prefix(run_dir: Path, step: int, cache: RolloutCache, state: dict) -> None:
    """consumed + held + dropped is the admitted prefix of the task stream, without duplicates; the ledger balances."""
    gone: dict[int, set[str]] = {}
    for record in runs.records(run_dir, step):
        gone.setdefault(record["group_id"], set()).add(record["rollout_id"])
    assert all(len(ids) == 3 for ids in gone.values())
    held = set(cache.groups)
    assert not held & set(gone), "a held group was consumed or dropped already"
    assert held | set(gone) == set(range(cache.num_admitted))
    ledger = Ledger()
    ledger.load_state_dict(state["ledger"])
    ledger.check(cache)


def children_of(process: runs.Run) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize(
    ("seed", "kills"),
    [(20, 8), pytest.param(21, 20, marks=pytest.mark.slow), pytest.param(22, 20, marks=pytest.mark.slow)],
)
def test_sigkill_at_random_moments(tmp_path: Path, seed: int, kills: int) -> None:
    rng = random.Random(seed)
    recipe = runs.write(tmp_path, steps=10_000, checkpoint={"every_steps": 3, "save_final_model": False})
    run_dir = tmp_path / "run"
    metrics = run_dir / "metrics.jsonl"
    partial: dict[str, list[int]] = {}
    committed = 0
    kept_partial = 0
    for kill in range(kills):
        # Killed before the first checkpoint, a run begins again.
        words = ["train", recipe, *(["--resume"] if kill else [])]
        process = runs.start(*words)
        try:
            # A resumed run goes on from the committed step, not from the start.
            deadline = time.monotonic() + 600
            fresh = committed + 1 + (kill % 4)
            while (rows := runs.json_lines(metrics)) == [] or rows[-1]["step"] < fresh:
                assert process.poll() is None, process.out + process.err
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(rng.random() * 0.8)
            workers = children_of(process)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert not psutil.wait_procs(workers, timeout=60)[1], "a child process outlived its killed parent"
        steps = [row["step"] for row in runs.json_lines(metrics)]
        assert steps == list(range(1, len(steps) + 1)), "duplicate or missing steps"
        if not CheckpointStore(str(run_dir / "checkpoints"), keep=2).list():
            continue
        step, cache, state = held_at(run_dir)
        assert step >= committed, "a committed checkpoint was lost"
        committed = step
        check_prefix(run_dir, step, cache, state)
        for group in cache.groups.values():
            for rollout in group.rollouts:
                tokens = rollout.token_ids()
                before = partial.get(rollout.rollout_id, [])
                assert tokens[: len(before)] == before, "tokens of an earlier checkpoint changed"
                partial[rollout.rollout_id] = tokens
                kept_partial += 0 < len(tokens) < 48
    assert committed >= kills and kept_partial >= kills
    done = runs.rollover("train", recipe, "--resume", "--train.num_steps", str(committed + 4))
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in runs.json_lines(metrics)] == list(range(1, committed + 5))
    rows = runs.json_lines(metrics)
    assert all(r["tokens/generated"] == r["tokens/trained"] + r["tokens/dropped"] + r["tokens/held"] for r in rows)
    told = runs.trace(run_dir)
    assert sum(e.tokens for e in told if e.kind in ("park", "finish")) == rows[-1]["tokens/generated"]
    assert sum(e.kind == "consume" for e in told) == rows[-1]["groups/consumed"]
    assert sum(e.kind == "admit" for e in told) == rows[-1]["groups/admitted"]
    assert all(0 < r["bias/trained_vs_dispatched_length"] < 2 for r in rows)
    final = {r["rollout_id"]: r["token_ids"] for r in runs.records(run_dir)}
    assert len(final) == len(runs.records(run_dir)), "a rollout was trained twice"
    resumed = [i for i in partial if i in final]
    assert resumed and all(final[i][: len(partial[i])] == partial[i] for i in resumed)
