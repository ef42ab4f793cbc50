"""Generation that goes on while the trainer trains: equal to synchronous training at staleness 0, in bound above it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import safetensors.numpy
import torch

from rollover.cli import main


def train(folder: Path, *, steps: int = 6, **tables: Any) -> list[dict[str, float]]:
    tables.setdefault("watchdog", {"rollout_timeout_s": 200.0})
    recipe = runs.write(folder, steps=steps, **tables)
    assert main(["train", str(recipe)]) == 0
    rows = runs.rows(folder)
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["staleness/max"] <= row["staleness/bound"]
        times = {key: value for key, value in row.items() if key.startswith("time/")}
        step_s, update_s = times.pop("time/step_s"), times.pop("time/update_s")
        logprobs_s = times.pop("time/logprobs_s", 0.0)
        assert update_s + logprobs_s <= times["time/train_s"] + 1e-6, "parts of the training of a step"
        assert sum(times.values()) <= step_s + 1e-6, f"a second is counted twice: {times} of {step_s}"
        waits = [value for key, value in row.items() if key.startswith("wait/")]
        assert len(waits) == 2 * bool(tables["rollout"].get("overlap")) and all(0 <= s <= step_s for s in waits)
    return rows


SYNC = {"in_flight_groups": None, "interrupt": "never", "max_staleness": None}
AHEAD = {"overlap": True, "in_flight_groups": 6, "max_staleness": 1}


def weights(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(next((folder / "run" / "model").glob("*.safetensors")))


def test_at_staleness_0_it_is_synchronous_training(tmp_path: Path) -> None:
    """The same rollouts, versions and weights, bit for bit."""
    # All rollouts have a slot: in another process a freed one is given away some steps later, and other rows that are
    # decoded together round otherwise.
    engine = {"max_running": 16, "threads": 1}
    sync = train(tmp_path / "sync", rollout=SYNC, engine=engine | {"threads": None})
    before = weights(tmp_path / "sync")
    texts = [(r["rollout_id"], r["completion"]) for r in runs.records(tmp_path / "sync" / "run")]
    same = ("reward/mean", "loss", "grad_norm", "tokens/generated", "length/mean", "staleness/max")
    changes = SYNC | {"overlap": True, "interrupt": "on_weight_update"}
    for kind in ("embedded", "process"):
        ahead = train(tmp_path / kind, rollout=changes, engine=engine | {"kind": kind})
        for one, other in zip(sync, ahead, strict=True):
            assert {k: one[k] for k in same} == {k: other[k] for k in same}, kind
        after = weights(tmp_path / kind)
        assert before.keys() == after.keys() and all(np.array_equal(before[k], after[k]) for k in before), kind
        assert texts == [(r["rollout_id"], r["completion"]) for r in runs.records(tmp_path / kind / "run")], kind


@pytest.mark.parametrize(("kind", "interrupt"), [("embedded", "never"), ("process", "on_weight_update")])
def test_generation_goes_on_while_the_trainer_trains(tmp_path: Path, kind: str, interrupt: str, capsys) -> None:
    rows = train(
        tmp_path, rollout=AHEAD | {"interrupt": interrupt, "max_new_tokens": 96}, steps=5,
        engine={"kind": kind, "max_running": 2},  # slower than the trainer, or new weights would meet nothing
        eval={"num_tasks": 2, "every_steps": 3}, track={"live": "verbose"},
    )  # fmt: skip
    assert max(row["staleness/max"] for row in rows) == 1
    # With "never" no rollout is cut by new weights, but where a checkpoint or an evaluation parked it.
    said = re.findall(r"(?:(?:generation|reward|trainer)-bound|balanced): the \w+ .* s\b", capsys.readouterr().out)
    assert len(said) == 5 + 1, "each step, and the summary, say who waits for whom"
    partial = sum(row["rollouts/partial_share"] for row in rows)
    assert partial > 0 if interrupt == "on_weight_update" else partial <= 5


def test_weights_may_be_handed_over_every_few_steps(tmp_path: Path) -> None:
    rows = train(
        tmp_path, steps=9, rollout=AHEAD | {"interrupt": "on_weight_update", "max_staleness": 3, "in_flight_groups": 9},
        train={"publish_every": 3},
    )  # fmt: skip
    assert [row["weights/bytes"] > 0 for row in rows] == [False, False, True] * 3
    assert max(row["staleness/max"] for row in rows) >= 2


def test_old_weights_make_tokens_stale_without_overlap_too(tmp_path: Path) -> None:
    rollout = {"interrupt": "never", "in_flight_groups": 6, "max_staleness": 3, "max_new_tokens": 8}
    rows = train(tmp_path, steps=5, rollout=rollout, train={"publish_every": 2})
    assert {row["staleness/bound"] for row in rows} == {2} == {max(row["staleness/max"] for row in rows)}


def test_the_trainer_has_the_cores_that_the_engine_does_not_use(tmp_path: Path, monkeypatch) -> None:
    seen: list[int] = []
    plain = torch.Tensor.backward

    def spy(self: torch.Tensor, *args: Any, **options: Any) -> None:
        seen.append(torch.get_num_threads())
        plain(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "backward", spy)
    threads = {"run": {"threads": 3}, "engine": {"max_running": 16, "threads": 1}}
    train(tmp_path / "idle", steps=2, rollout=SYNC | {"overlap": True, "interrupt": "on_weight_update"}, **threads)
    assert set(seen) == {3}, "nothing may be generated beside these steps"
    seen.clear()
    train(tmp_path / "busy", steps=4, rollout=AHEAD | {"interrupt": "on_weight_update"}, **threads)
    assert 2 in seen, "the first micro-batch of a step beside generation"
