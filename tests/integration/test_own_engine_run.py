"""An engine of the user's own that breaks the contract in a run: a sentence names it, and nothing wrong is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
from runs import check_whole

from rollover.cli import main

ENGINES = """
from dataclasses import replace
import numpy as np
from fake_engine import FakeEngine

class Right(FakeEngine):
    def __init__(self, setup):
        super().__init__(lambda seed: 3 + seed % 9, vocab_size=100, turns_between_steps=4)

def answering(answer):
    class Answering(Right):
        async def extend(self, request):
            return answer(await super().extend(request))
    return Answering

Outside = answering(lambda segments: [replace(s, token_ids=s.token_ids + np.int32(70000)) for s in segments])

def failing(name, awaited=False):
    def fail(self, *args):
        raise KeyError("gpu")
    async def fail_later(self, *args):
        raise KeyError("gpu")
    return type("Failing", (Right,), {name: fail_later if awaited else fail})

Stats, Weights, Closes = failing("stats"), failing("load_weights", True), failing("close", True)

"""
REWARD = "def reward(completions, **columns):\n    return [1.0] * len(completions)\n"


def recipe(folder: Path, name: str) -> Path:
    (folder / "mine.py").write_text(ENGINES)
    file = runs.write(
        folder,
        steps=2,
        engine={"kind": f"{folder}/mine.py:{name}"},
        watchdog={"max_failures": 2, "retry_s": 0.01},
        checkpoint={"save_final_model": False},
    )
    # All advantages are 0, so that a micro-batch is never computed in which a wrong id would be noticed.
    (folder / "reward.py").write_text(REWARD)
    return file


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Outside", "is refused, as its token 0 has the id 700"),
        ("Stats", "its stats failed: KeyError: 'gpu'"),
        ("Weights", "its load_weights failed: KeyError: 'gpu'"),
    ],
)
def test_a_broken_engine_is_named_and_the_run_goes_on_with_a_right_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    file = recipe(tmp_path, name)
    assert main(["train", str(file)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("rollover: error: ") and why in error, error
    assert f"engine.kind = '{tmp_path}/mine.py:{name}'" in error
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(row["tokens/trained"] == 0 for row in rows[: name != "Weights"])
    go_on = [] if name == "Stats" else ["--resume"]  # those fail before there is a run
    assert main(["train", str(file), *go_on, f"--engine.kind={tmp_path}/mine.py:Right"]) == 2
    assert "nothing was trained: every gradient was 0" in capsys.readouterr().err, "all rewards are equal"
    if name != "Weights":  # the weights that it did not take are told as live nowhere
        check_whole(tmp_path / "run", 2)


def test_an_engine_that_fails_at_its_close_loses_nothing_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe(tmp_path, "Closes"))]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "Closes': its close failed: KeyError: 'gpu' (" in error and error.endswith("(engine/protocol.py)")
    check_whole(tmp_path / "run", 2)
