"""The comparisons of scripts/net find each kind of difference, and accept a run that is equal to itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from net.compare import between, check_run, compare_rows, compare_tensors, renamed, renamed_tensors, steady
from net.golden import differences
from net.kills import PLACES, selection
from net.modes import MODES, write
from net.trees import NO_RENAMES, Tree
from safetensors.torch import save_file

STEPS = 2


def row(step: int) -> dict[str, Any]:
    tokens = {"generated": 12 * step, "trained": 12 * step, "dropped": 0, "held": 0}
    groups = {"admitted": step, "consumed": step, "dropped": 0, "held": 0}
    return {
        "step": step,
        "time/step_s": 0.1 * step,
        "loss": 0.5,
        "grad_norm": 1.0,
        "staleness/max": 0.0,
        "staleness/bound": 0,
        "mismatch/logprob_abs_max": 1e-7,
        **{f"tokens/{k}": v for k, v in tokens.items()},
        **{f"groups/{k}": v for k, v in groups.items()},
    }


def record(step: int, sibling: int) -> dict[str, Any]:
    return {
        "rollout_id": f"{step - 1}-{sibling}",
        "group_id": step - 1,
        "task_id": f"tasks/{step}",
        "attempt": 0,
        "step": step,
        "outcome": "trained",
        "num_tokens": 4,
        "token_ids": [5, 6, 7, 1],
        "advantages": [0.25] * 4,
        "segments": [{"policy_version": step - 1, "num_tokens": 4, "trainable": True}],
    }


class Run:
    """A run directory whose rows, records and tensors a test changes before they are written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = [row(1), row(2)]
        self.records = [record(step, sibling) for step in (1, 2) for sibling in range(3)]
        self.tensors = {"layer.weight": torch.arange(6.0).reshape(2, 3)}
        events = [[kind, 0.1, s, s] for s in range(STEPS) for kind in ("admit", "ready", "consume")]
        self.events = [*events, ["publish", 0.2, 1], ["publish", 0.3, 2]]

    def write(self) -> Path:
        run = self.folder / "run"
        for name in ("rollouts", "model"):
            (run / name).mkdir(parents=True)
        files = {"metrics.jsonl": self.rows, "trace.jsonl": self.events}
        for step in (1, 2):
            files[f"rollouts/step-{step:06}.jsonl"] = [r for r in self.records if r["step"] == step]
        for name, rows in files.items():
            (run / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
        save_file(self.tensors, run / "model" / "model.safetensors")
        return self.folder


@pytest.fixture
def found(tmp_path: Path) -> Any:
    """Differences between an unchanged run and one that `change` changed, and the faults of the latter alone."""

    def compared(change: Any) -> str:
        one, other = Run(tmp_path / "one"), Run(tmp_path / "other")
        change(other)
        tree = Tree("same", tmp_path)
        lines = differences(one.write(), other.write(), tree, tree)
        return "\n".join([*lines, *check_run(tmp_path / "other" / "run", MODES["sync"], STEPS)])

    return compared


def test_equal_runs_differ_in_their_times_alone(found: Any) -> None:
    assert found(lambda run: run.rows[0].update({"time/step_s": 9.0})) == ""


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda run: run.tensors["layer.weight"][1, 2].add_(1e-6), "model/model.safetensors:layer.weight: differs"),
        (lambda run: run.tensors.update(more=torch.ones(1)), "model/model.safetensors:more: only in current"),
        (lambda run: run.rows[1].update(loss=0.5000001), "metrics.jsonl step 2 loss: 0.5 before, 0.5000001 now"),
        (lambda run: run.rows[1].pop("loss") and run.rows[1].update(loss=0.0), "metrics.jsonl step 2 loss"),
        (lambda run: run.rows.pop(0), "metrics.jsonl step 1: only in before"),
        (lambda run: run.rows.append(run.rows[1]), "metrics.jsonl step 2: twice in current"),
        (
            lambda run: run.records[3]["advantages"].__setitem__(2, 0.250025),
            "rollouts step 2 rollout_id 1-0 advantages: [2] 0.25 before, 0.250025 now",
        ),
        (lambda run: run.records.pop(), "rollouts step 2 rollout_id 1-2: only in before"),
        (lambda run: run.records[3].update(group_id=0), "group 0: in steps [(1, True), (2, True)]"),
        (lambda run: run.rows[1].update({"tokens/held": 1}), "tokens/generated 24 is not the sum of"),
        (lambda run: run.rows[1].update(loss=float("nan")), "step 2 loss: nan is not finite"),
        (lambda run: run.rows[1].update({"mismatch/logprob_abs_max": 0.01}), "logprob_abs_max: 0.01 exceeds"),
        (lambda run: run.records[0]["segments"][0].update(policy_version=1), "version 1 in step 1 exceeds the bound"),
        (lambda run: run.events.append(["consume", 0.4, 1, 1]), "trace.jsonl: consume 1 2 times"),
    ],
)
def test_each_kind_of_difference_is_found(found: Any, change: Any, line: str) -> None:
    assert line in found(change)


def test_renames_reach_every_depth_and_chain_between_trees() -> None:
    names = between({"first": "second"}, {"first": "third", "gone": ""})
    assert names == {"second": "third", "gone": ""}
    assert renamed({"second": [{"second": 1, "gone": 2}]}, names) == {"third": [{"third": 1}]}
    tensors = {"a.safetensors:w": torch.ones(1), "b.safetensors:w": torch.ones(1)}
    moved = renamed_tensors(tensors, {"a.safetensors:": "c.safetensors:", "b.safetensors:w": ""})
    assert list(moved) == ["c.safetensors:w"]


def test_tolerance_is_of_one_element_and_shape_is_compared() -> None:
    one, other = {"w": torch.zeros(3)}, {"w": torch.tensor([0.0, 0.0, 2e-4])}
    assert compare_tensors(one, other, 1e-3) == []
    assert compare_tensors(one, other, 1e-4) == ["w: differs by at most 0.0002 (limit 0.0001)"]
    assert "(2,)" in compare_tensors(one, {"w": torch.zeros(2)}, 1.0)[0]
    assert compare_rows([{"step": 1}], [{"step": 1, "new": 2}], key=("step",), where="f", new={"new"}) == []
    assert steady({"time": 1, "train/teacher_s": 2, "loss": 3}) == {"loss": 3}


def test_selection_has_every_mode_and_rotates_with_the_seed() -> None:
    cells = selection(1, len(MODES))
    assert {mode for mode, _ in cells} == set(MODES) and selection(2, len(MODES)) != cells
    assert {place for _, place in selection(1, len(MODES) * len(PLACES))} == set(PLACES)


def test_recipes_are_written_under_the_renamed_keys(tmp_path: Path) -> None:
    def recipe(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        tables["train"]["lr"] = tables["train"].pop("learning_rate")
        return tables

    renames = {**NO_RENAMES, "recipe": recipe, "CODE": {"rollover.envs.tools": "rollover.agents.tools"}}
    text = write(MODES["critic"], tmp_path / "mode", renames).read_text()
    assert "lr = 0.001\n" in text and "\nlearning_rate = 0.001\n" in text, "the critic's is another key"
    assert "from rollover.agents.tools import Call" in (tmp_path / "mode" / "functions.py").read_text()
