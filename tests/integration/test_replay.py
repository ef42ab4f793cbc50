"""Replay and re-roll in the real loop: that they are called, in all modes."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import runs
import safetensors.torch
import torch

from rollover import cli
from rollover.checkpoint.store import CheckpointStore
from rollover.tasks.reroll import ATTEMPT
from rollover.track.metrics import validate
from rollover.trainer.batch import Batch
from rollover.trainer.trainer import Trainer

SPARSE = '''
def reward(prompts, completions, **columns):
    """1 for an answer with a 7 in it, else 0: of most groups every rollout fails."""
    return [float("7" in text) for text in completions]
'''
SYNC = {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 0}
MODES: dict[str, dict[str, Any]] = {
    "sync": SYNC,
    "streaming": {"complete_fraction": 0.5, "supplement": True, "in_flight_groups": 6},
    "one step off": {"interrupt": "never", "in_flight_groups": 6, "max_staleness": 1},
    "mask": {"max_staleness": 0, "on_stale": "mask"},
    "partial": {},
}
BOTH: dict[str, dict[str, Any]] = {
    "replay": {"size": 6, "max_staleness": 4},
    "reroll": {"max_groups": 1, "start_fraction": 0.25, "size": 5},
}


def write(folder: Path, rollout: dict[str, Any], steps: int = 12, **tables: dict[str, Any]) -> Path:
    small = {"max_new_tokens": 12, "stop": ["x", "q"]}
    recipe = runs.write(folder, steps=steps, rollout=small | rollout, **tables)
    (folder / "reward.py").write_text(SPARSE)
    return recipe


def rows(folder: Path) -> list[dict[str, Any]]:
    return runs.json_lines(folder / "run" / "metrics.jsonl")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "run" / "model" / "model.safetensors")


def same_weights(a: Path, b: Path) -> bool:
    ours, theirs = weights(a), weights(b)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("mode", MODES)
def test_both_are_called_in_every_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], mode: str
) -> None:
    batches: list[Batch] = []
    plain = Trainer.train_step

    def spy(self: Trainer, batch: Batch) -> dict[str, float]:
        batches.append(batch)
        return plain(self, batch)

    monkeypatch.setattr(Trainer, "train_step", spy)
    assert cli.main(["train", str(write(tmp_path, MODES[mode], steps=16, **BOTH))]) == 0
    table, events = rows(tmp_path), runs.trace(tmp_path / "run")
    consumed = Counter(e.version for e in events if e.kind == "consume")
    for row, batch in zip(table, batches, strict=True):
        validate(row)
        assert len({s.group_id for s in batch.samples}) == consumed[row["step"] - 1], "a step has its number of groups"
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["staleness/max"] <= row["staleness/bound"]
        assert 1 <= row.get("staleness/replayed_max", 1) <= 4
        assert ("staleness/replayed_max" in row) == bool(batch.replayed)
        assert 0 <= row["replay/size"] <= 6 and 0 <= row["reroll/size"] <= 5
    last = table[-1]
    assert last["replay/replaced"] == sum(len(b.replayed) for b in batches) > 0
    replayed = [s for b in batches for s in b.samples if s.group_id in b.replayed]
    assert last["tokens/replayed"] == sum(int(s.mask.sum()) for s in replayed) > 0
    assert all(s.advantages[s.mask].any() for s in replayed if s.mask.any())
    # Given again: the same task, not before a quarter of the run, at most one a step, with other draws.
    assert 0 < last["reroll/given"] <= 12
    assert last["reroll/queued"] == last["reroll/given"] + last["reroll/size"]
    output = capfd.readouterr()
    told = re.findall(r"re-roll: (\d+) failed tasks were given again, (\d+) wait", output.out + output.err)
    assert sum(int(given) for given, _ in told) == last["reroll/given"]
    assert all(int(waiting) <= 5 for _, waiting in told)
    attempts: dict[str, list[int]] = {}
    for record in runs.records(tmp_path / "run"):
        attempts.setdefault(record["task_id"], []).append(record["attempt"])
    assert any(min(of) == 0 and max(of) >= ATTEMPT for of in attempts.values())
    assert len({r["rollout_id"] for r in runs.records(tmp_path / "run")}) == len(runs.records(tmp_path / "run"))


def test_off_has_no_effect_and_no_metrics(tmp_path: Path) -> None:
    assert cli.main(["train", str(write(tmp_path / "off", SYNC))]) == 0
    assert not [key for key in rows(tmp_path / "off")[-1] if "replay" in key or "reroll" in key]
    assert cli.main(["train", str(write(tmp_path / "on", SYNC, replay=BOTH["replay"]))]) == 0
    assert not same_weights(tmp_path / "off", tmp_path / "on")


PARTS = """
def seven(completions, **columns):
    return [float("7" in text) for text in completions]

def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) for text in completions]

def odd(completions, answer, **columns):
    return [-float(int(number) % 2) for number in answer]
"""


def parts(folder: Path, **weights: float) -> dict[str, Any]:
    """The reward table of functions of PARTS with these weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parts.py").write_text(PARTS)
    rows = [{"function": f"{folder / 'parts.py'}:{name}", "weight": weight} for name, weight in weights.items()]
    return {"function": None, "functions": rows}


def state_of(folder: Path) -> dict[str, Any]:
    """The state of replay and re-roll in the last checkpoint."""
    store = CheckpointStore(str(folder / "run" / "checkpoints"), keep=2)
    return json.loads(Path(store.open(store.list()[-1])["state.json"]).read_text())["reuse"]


def test_replay_score_adds_deviations_of_all_functions(tmp_path: Path) -> None:
    rewards = parts(tmp_path, seven=1.0, digits=0.25, odd=0.0)
    recipe = write(tmp_path, SYNC, steps=4, rewards=rewards, replay={"size": 64, "max_staleness": 8})
    assert cli.main(["train", str(recipe)]) == 0
    siblings: dict[int, list[dict[str, Any]]] = {}
    for record in runs.records(tmp_path / "run"):
        siblings.setdefault(record["group_id"], []).append(record)
    buffer = state_of(tmp_path)["buffer"]
    assert len(buffer["scores"]) > 2
    for saved, score in zip(buffer["groups"], buffer["scores"], strict=True):
        of = siblings[saved["group_id"]]
        spread = sum(statistics.stdev(r["extras"][name] for r in of) for name in ("seven", "digits"))
        assert score == pytest.approx(sum(abs(r["advantage"]) for r in of) * spread)


@pytest.mark.parametrize("failed_at_most", [0.0, "equal_zero"])
def test_reroll_equal_zero_queues_groups_of_zero_rewards(tmp_path: Path, failed_at_most: float | str) -> None:
    rewards = parts(tmp_path, seven=1.0, odd=0.5)
    reroll = {"max_groups": 1, "start_fraction": 0.9, "failed_at_most": failed_at_most}
    assert cli.main(["train", str(write(tmp_path, SYNC, steps=4, rewards=rewards, reroll=reroll))]) == 0
    answers = {int(task["columns"]["answer"]) % 2 for task, _ in state_of(tmp_path)["reroll"]["queue"]}
    assert answers == ({0} if failed_at_most == "equal_zero" else {0, 1})


def test_recorded_rollouts_are_replayed_alike(tmp_path: Path) -> None:
    recipe = write(tmp_path / "run1", SYNC, steps=8, replay=BOTH["replay"])
    assert cli.main(["train", str(recipe)]) == 0
    again = write(tmp_path / "run2", SYNC, steps=8, replay=BOTH["replay"])
    assert cli.main(["train", str(again), "--run.train_on_recorded", str(tmp_path / "run1" / "run" / "rollouts")]) == 0
    assert rows(tmp_path / "run2")[-1]["replay/replaced"] == rows(tmp_path / "run1")[-1]["replay/replaced"] > 0
    assert same_weights(tmp_path / "run1", tmp_path / "run2")


def test_a_checkpoint_from_before_starts_with_empty_buffers(tmp_path: Path) -> None:
    """Switching both on in the middle of a run is allowed; so is switching them off."""
    assert cli.main(["train", str(write(tmp_path, SYNC, steps=4))]) == 0
    assert cli.main(["train", str(write(tmp_path, SYNC, steps=10, **BOTH)), "--resume"]) == 0
    assert rows(tmp_path)[-1]["replay/size"] > 0
    assert cli.main(["train", str(write(tmp_path, SYNC, steps=12)), "--resume"]) == 0
    assert "replay/size" not in rows(tmp_path)[-1]


def test_snapshots_are_kept_for_replayed_versions(tmp_path: Path) -> None:
    """proximal = "snapshot" needs the weights of every version that a replayed token was sampled under."""
    recipe = write(tmp_path, SYNC, replay=BOTH["replay"], algorithm={"proximal": "snapshot"})
    assert cli.main(["train", str(recipe)]) == 0
    assert max(row.get("staleness/replayed_max", 0) for row in rows(tmp_path)) >= 3
    # The engine samples in the trainer's numerics here, so that nothing is left for the weights to correct.
    assert all(row.get("importance/max", 1.0) == pytest.approx(1.0, abs=1e-3) for row in rows(tmp_path))
