"""`rollover.Run`: a run, finished, stopped or live, read from its directory (docs/running.md) on demand.

Writes nothing.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollover.files import short_path
from rollover.run.run_files import RunFiles
from rollover.track.records import read_records, read_rollouts, step_files
from rollover.track.trace import TraceEvent
from rollover.types import Group

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas

_PLOTTED = ("reward/mean", "sft/loss", "length/mean", "staleness/mean", "time/step_s")


class Run:
    """A run, read from its `directory`. Each access reads the files, so a live run shows more each time."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        live: Mapping[str, Any] | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """`live`: functions and tasks that the run was given as objects, by name; `given`: its configuration, if this
        process made the run. `resume` uses both, and needs no `trust` for them."""
        self._files = RunFiles(directory)
        self.directory = self._files.directory
        self._live, self._given = dict(live or {}), dict(given or {})

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the run, as in config.resolved.json. {} before the run has begun."""
        return self._files.config

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per training step (docs/metrics.md)."""
        return self._files.metrics()

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """One dict per evaluation: step, mean, ci, pass@k, sources, samples."""
        return copy.deepcopy(self._files.evaluations())

    @property
    def trace(self) -> list[TraceEvent]:
        """The events of all rollouts (docs/trace.md); [] where track.trace is off."""
        return list(self._files.events())

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self._files.finished

    @property
    def model_path(self) -> Path:
        """The trained model, for transformers' from_pretrained. ValueError where none is saved (yet)."""
        path = self.directory / "model"
        if self.finished and path.is_dir():
            return path
        why = (
            "checkpoint.save_final_model is off" if self.finished else f"the run is not finished; {self._resume_hint()}"
        )
        raise ValueError(f"{str(self.directory)!r} has no trained model: {why}")

    def rollouts(self, *, dropped: bool = False) -> Iterator[Group]:
        """Iterate over the trained groups, in order; with `dropped` also over dropped ones. Reads step by step.

        ValueError for a damaged file.
        """
        for groups in read_rollouts(self._files.recorded, include_dropped=dropped) if self._recorded else ():
            yield from groups

    def records(self) -> Iterator[dict[str, Any]]:
        """Iterate over one dict per rollout, trained or dropped, as in rollouts/ (docs/running.md): "step", "prompt" or
        "messages", "completion", "score", "advantage", "outcome", "segments" and more."""
        return read_records(self._files.recorded) if self._recorded else iter(())

    def to_pandas(self, what: Literal["metrics", "evaluations", "rollouts"] = "metrics") -> pandas.DataFrame:
        """Return a frame with a row per step, evaluation or rollout. ImportError where pandas is not installed."""
        frame = _package("pandas", "Run.to_pandas").DataFrame
        rows = {"metrics": lambda: self.metrics, "evaluations": lambda: self.evaluations, "rollouts": self.records}
        if what not in rows:
            raise ValueError(f"to_pandas({what!r}): expected one of {', '.join(rows)}")
        return frame(list(rows[what]()))

    def plot(self, *keys: str) -> matplotlib.figure.Figure:
        """Return a figure with one line over the steps for each metric; default: reward, length, staleness, time.

        Evaluations are drawn with the reward. ImportError where matplotlib is not installed. ValueError for a key that
        no step has.
        """
        plt = _package("matplotlib.pyplot", "Run.plot")
        rows, evaluations = self.metrics, self.evaluations
        known = {key for row in rows for key in row}
        for key in keys:
            if key not in known:
                raise ValueError(f"plot: no step has the metric {key!r} (docs/metrics.md lists them)")
        chosen = keys or tuple(key for key in _PLOTTED if key in known) or _PLOTTED[:1]
        figure, axes = plt.subplots(len(chosen), 1, sharex=True, squeeze=False, figsize=(7, 1 + 1.8 * len(chosen)))
        for key, (axis,) in zip(chosen, axes, strict=True):
            axis.plot([row["step"] for row in rows], [_number(row.get(key)) for row in rows])
            axis.set_ylabel(key)
            if key == "reward/mean" and evaluations:
                axis.plot(
                    [e["step"] for e in evaluations], [_number(e["mean"]) for e in evaluations], "o", label="held out"
                )
                axis.legend()
        axes[-1][0].set_xlabel("step")
        figure.tight_layout()
        plt.close(figure)  # a notebook draws the returned figure
        return figure

    def resume(self, *, trust: bool = False, **overrides: Any) -> Run:
        """Resume the run, as `rollover.train(resume=run.directory, ...)` with its functions and tasks."""
        from rollover.api.session import train_and_wait
        from rollover.api.settings import Arguments

        names = ("model", "tasks", "reward", "eval_tasks", "config", "examples", "rollouts")
        named: dict[str, Any] = {name: overrides.pop(name, None) for name in names}
        arguments = Arguments(
            **named, resume=self.directory, overrides=overrides, trust=trust, live=self._live, given=self._given
        )
        return after_training(*train_and_wait(arguments))

    def __repr__(self) -> str:
        rows, num_steps = self.metrics, self._files.value("train.num_steps", "?")
        step = rows[-1]["step"] if rows else 0
        state = "finished" if self.finished else f"not finished: {self._resume_hint()}"
        return f"<Run {short_path(self.directory)!r}: {step} of {num_steps} steps, {state}>"

    def _resume_hint(self) -> str:
        return "run.resume() goes on" + ("" if self._live else f" (rollover.train(resume={str(self.directory)!r}))")

    @property
    def _recorded(self) -> bool:
        """Whether there are recorded rollouts. ValueError where track.rollouts is off."""
        if self._files.value("track.rollouts") is False:
            raise ValueError(f"{str(self.directory)!r} records no rollouts: track.rollouts is off")
        return bool(step_files(self._files.recorded))


def after_training(directory: Path, live: Mapping[str, Any], given: Mapping[str, Any]) -> Run:
    """Return the run. Print it if it was stopped: its text says how to resume."""
    run = Run(directory, live, given)
    if not run.finished:
        print(run)
    return run


def open(directory: str | os.PathLike[str]) -> Run:
    """Open the run in `directory`, finished or live. ValueError where there is none."""
    return Run(directory)


def _package(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise ImportError(f"{what} needs the package {package}: pip install {package}") from error


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
