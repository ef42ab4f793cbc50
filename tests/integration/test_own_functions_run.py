"""Functions of the user's own that go wrong in a run: the console says which, where, and what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import runs

from rollover.cli import main

SOMETIMES = """
def reward(prompts, completions, answer, **columns):
    if len(answer) == 3 and int(answer[0]) % 3 == 0:  # not at start-up, where there are one and two
        raise KeyError("nothing for " + answer[0])
    return [sum(c.isdigit() for c in text) / 48 for text in completions]

def zero(prompts, completions, answer, **columns):
    return [float(text == answer[0] + "!") for text in completions]
"""


# option -> (parameters, what is right, when it goes wrong, what is wrong then, what is said of it). How often a
# function is called in a step may depend on timing; groups from 8 on are there after the first step alone.
FAILING: dict[str, tuple[str, str, str, str, str]] = {
    "algorithm.advantage": (
        "r, g",
        "r - r.nanmean()",
        "len(calls) >= 3",
        "r * float('nan')",
        "returned nan at 9 of 9 rollouts",
    ),
    "algorithm.after_scoring": ("rollouts, a", "a", "len(calls) >= 3", "a[:1]", "of the shape [1] for 9 rollouts"),
    "algorithm.loss": (
        "t",
        "(-t.ratio_BT * t.advantages_BT, t.mask_BT & False)",
        "len(calls) >= 4",
        "(t.logprobs_BT * float('nan'), t.mask_BT)",
        "returned a loss that is nan at",
    ),
    "filters.custom": (
        "group",
        "None",
        "group.group_id >= 8",
        "1 / 0",
        "failed: ZeroDivisionError: division by zero (mine.py:5)",
    ),
    "track.metrics": ("groups", "{'groups': len(groups)}", "len(calls) >= 3", "3", "returned 3 (int)"),
    "rollout.order": ("view", "(view.remaining,)", "view.group_id >= 8", "None", "returned None"),
    "tasks.before_produce": (
        "task, version",
        "task",
        "len(calls) >= 12",
        "[][0]",
        "failed: IndexError: list index out of range",
    ),
}


def own(parameters: str, right: str, when: str, wrong: str) -> str:
    lines = ["calls = []", f"def own({parameters}):", "    calls.append(1)", f"    if {when}:"]
    return "\n".join([*lines, f"        return {wrong}", f"    return {right}", ""])


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    code = main([str(w) for w in words])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out + said.err


def recipe(folder: Path, **tables: dict[str, Any]) -> Path:
    file = runs.write(folder, steps=4, **{"rollout": {"max_new_tokens": 12}, **tables})
    (folder / "reward.py").write_text(SOMETIMES)
    return file


def test_a_reward_that_sometimes_raises_is_told_at_once_and_in_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = run(capsys, "train", recipe(tmp_path, rewards={"function": "reward.py:reward"}))
    lines = [" ".join(line.split()) for line in said.splitlines()]
    first = [line for line in lines if "reward reward.py:reward failed for task tasks/" in line]
    assert code == 0 and len(first) == 1
    assert re.fullmatch(
        r"reward reward\.py:reward failed for task tasks/\d+: KeyError: 'nothing for \d+' \(reward\.py:4\)\. Its reward"
        r" is missing; later failures are counted \(rewards/\*\)",
        first[0],
    )
    (last,) = [line for line in lines if line.startswith("Rewards: ")]
    assert " rewards failed; " in last and "KeyError: 'nothing for " in last and last.endswith("(reward.py:4)")


def test_rewards_that_are_all_the_same_are_told_with_an_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = run(capsys, "train", recipe(tmp_path, rewards={"function": "reward.py:zero"}))
    (line,) = [line for line in said.splitlines() if "every reward of" in line]
    assert code == 2 and "nothing was trained: every gradient was 0" in said
    assert "every reward of reward.py:zero so far is 0 (18 of them)" in line
    assert "prompts and completions as strings" in line and "and answer = '" in line
    assert "learning_rate" not in said, "another rate would not help"


ASYNC = {"overlap": True, "interrupt": "on_weight_update"}


@pytest.mark.parametrize(
    ("option", "mode"), [*((o, {}) for o in FAILING), ("algorithm.loss", ASYNC), ("filters.custom", ASYNC)]
)
def test_a_function_that_goes_wrong_later_ends_the_run_with_one_line_and_a_checkpoint(
    option: str,
    mode: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And with the function mended, the run goes on to its end: one of the trainer, one of the rollouts."""
    monkeypatch.chdir(tmp_path)
    parameters, right, when, wrong, text = FAILING[option]
    file = runs.write(
        tmp_path,
        steps=5,
        rollout={"max_new_tokens": 16, **mode},
        checkpoint={"every_steps": 0, "save_final_model": False},
    )
    (tmp_path / "mine.py").write_text(own(parameters, right, when, wrong))
    words = ["train", str(file), f"--{option}", "mine.py:own"]
    code, said = run(capsys, *words)
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert code == 2 and 0 < len(rows) < 5, said
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"rollover: error: {option} = 'mine.py:own'") and text in last, said
    assert "mine.py:" in last and "it must return" in last and "learning_rate" not in said
    checkpoints = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints == [f"step-{len(rows):06d}"]
    if option not in ("algorithm.loss", "filters.custom"):
        return
    (tmp_path / "mine.py").write_text(own(parameters, right, "False", wrong))
    code, said = run(capsys, *words, "--resume")
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert code == 0 and [row["step"] for row in rows] == [1, 2, 3, 4, 5], said
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["groups/admitted"] == row["groups/consumed"] + row["groups/dropped"] + row["groups/held"]


ENGINE = """
from fake_engine import FakeEngine
from rollover.engine.protocol import Engine

class Own:
    def __init__(self, setup):
        self._fake = FakeEngine(lambda seed: 3 + seed % 9, vocab_size=100, turns_between_steps=4)

    def __getattr__(self, name):
        if name not in vars(Engine):
            raise AttributeError(f"a run asks for {name}, which is not in the protocol of an engine")
        return getattr(self._fake, name)
"""


def test_an_engine_of_ones_own_generates_for_training_and_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has what is in the protocol, and nothing more."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ENGINE)
    file = runs.write(tmp_path, engine={"kind": "mine.py:Own"}, eval={"num_tasks": 4})
    code, said = run(capsys, "train", file)
    assert code == 0, said
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and all(row["tokens/step_trained"] > 0 for row in rows)
    lengths = {r["num_tokens"] for r in runs.records(tmp_path / "run")}
    assert lengths <= set(range(3, 12)) and len(lengths) > 1, "those of that engine"
    code, said = run(capsys, "eval", file, "--model", tmp_path / "model")
    assert code == 0 and "mean" in said, said


COUNTED = """
from rollover.engine.build import embedded_engine

class Counted:
    def __init__(self, setup):
        self.inside = embedded_engine(setup.model(), setup.config, copies=setup.beside_trainer)
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self.inside, name)

    async def extend(self, request):
        self.calls += 1
        return await self.inside.extend(request)

    def stats(self):
        return {**self.inside.stats(), "engine/calls": self.calls, "engine/name": "mine", "loss": 0.0}
"""


def test_what_an_engine_of_ones_own_counts_is_a_metric_and_what_is_none_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does what a process reports that was started again from another version of this package."""
    recipe = runs.write(tmp_path, steps=2, engine={"kind": f"{tmp_path / 'engine.py'}:Counted"})
    (tmp_path / "engine.py").write_text(COUNTED)
    code = main(["train", str(recipe)])
    out = capsys.readouterr()
    assert code == 0, out.err
    for line in ("the engine reports engine/name = 'mine', which is left out", "the engine reports loss = 0.0, which"):
        assert (out.out + out.err).count(line) == 1
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert 0 < rows[0]["engine/calls"] < rows[1]["engine/calls"] and rows[0]["loss"] != 0.0
