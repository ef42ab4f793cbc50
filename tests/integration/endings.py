"""Runs in this process that end where a test says, as by a kill: what is in their files by then is all that is left.

The end is an exception that nothing catches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from rollover import cli
from rollover.run.loop import Run
from rollover.run.pipeline import Pipeline
from rollover.run.step_log import StepLog

CHECKPOINT: dict[str, Any] = {"every_steps": 50, "save_final_model": False}


def train(capsys: pytest.CaptureFixture[str], *words: str | Path, verb: str = "train") -> tuple[int, str]:
    """`rollover train WORDS`, or another verb: its exit code, and all that it says."""
    code = cli.main([verb, *map(str, words)])
    out = capsys.readouterr()
    assert "Traceback" not in out.err, out.err
    return code, out.out + out.err


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {
        name: t.clone()
        for name, t in run.components.trainer.backend.save_state()[0].items()
        if not name.startswith("random")
    }


@dataclass
class Ended:
    """What a run had when it ended: its weights, and what it said."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    text: str = ""


def end(*args: Any, **kwargs: Any) -> Any:
    """In place of a method: the run ends when it is called."""
    raise KeyboardInterrupt


def train_until_called(capsys: pytest.CaptureFixture[str], owner: Any, method: str, *words: str | Path) -> Ended:
    """Train until `owner.method` is called."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(owner, method, end)
        code, text = train(capsys, *words)
    assert code == 130, text
    return Ended(text=text)


def train_until(
    capsys: pytest.CaptureFixture[str], version: int, *words: str | Path, before_row: bool = False
) -> Ended:
    """Train until generation for the step at `version` begins; `before_row`: until the row of the step before it is
    to be written."""
    ended = Ended()

    def end_here(run: Run) -> NoReturn:
        ended.weights = weights(run)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as monkeypatch:
        if before_row:
            of_step, run = StepLog.on_step, running(monkeypatch)

            def of_step_or_end(log: StepLog, *args: Any) -> dict[str, float]:
                return end_here(run[-1]) if args[3] == version - 1 else of_step(log, *args)

            monkeypatch.setattr(StepLog, "on_step", of_step_or_end)
        else:
            before_step(monkeypatch, lambda run, at: end_here(run) if at == version else None)
        code, ended.text = train(capsys, *words)
    assert code == 130, ended.text
    return ended


def running(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that begin from now on, once they have."""
    begun: list[Run] = []
    begin = Run.begin

    async def looking(run: Run) -> Any:
        newest = await begin(run)
        begun.append(run)
        return newest

    monkeypatch.setattr(Run, "begin", looking)
    return begun


def before_step(monkeypatch: pytest.MonkeyPatch, hook: Callable[[Run, int], object]) -> None:
    """From now on `hook(run, version)` is called before generation for the step at `version` begins."""
    begun, produce = running(monkeypatch), Pipeline.produce

    async def hooked(producer: Pipeline, step: int, version: int) -> Any:
        hook(begun[-1], version)
        return await produce(producer, step, version)

    monkeypatch.setattr(Pipeline, "produce", hooked)


def look_at_start(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The weights with which a run takes its first step, once it has."""
    found: dict[str, torch.Tensor] = {}
    before_step(monkeypatch, lambda run, version: found or found.update(weights(run)))
    return found
