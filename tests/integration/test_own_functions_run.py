"""Functions of the user's own that go wrong in a run: the console says which, where, and what is wrong."""

from __future__ import annotations

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
    assert "KeyError: 'nothing for " in first[0] and "(reward.py:4)" in first[0]
    (last,) = [line for line in lines if line.startswith("Rewards: ")]
    assert " rewards failed; " in last and "KeyError: 'nothing for " in last and last.endswith("(reward.py:4)")


def test_rewards_that_are_all_the_same_are_told_with_an_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = run(capsys, "train", recipe(tmp_path, rewards={"function": "reward.py:zero"}))
    (line,) = [line for line in said.splitlines() if "every reward of" in line]
    assert code == 0 and "every reward of reward.py:zero so far is 0 (18 of them)" in line
    assert "prompts and completions as strings" in line and "and answer = '" in line
    assert "learning_rate" not in said, "another rate would not help"
