"""The directory of one run: its files, whether this run may use it, and the command that goes on with it.

    config.resolved.json  metrics.jsonl  eval.jsonl  trace.jsonl  rollouts/  checkpoints/  checkpointed  model/

Owns where things lie. Never decides what is written, nor when.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Collection
from pathlib import Path

from rollover.checkpoint.store import CheckpointStore, checkpoint_name
from rollover.config import Config
from rollover.files import check_writable
from rollover.track.metrics import validate
from rollover.track.recorder import RolloutRecorder
from rollover.track.sinks import JsonlSink, atomic_write_text
from rollover.track.trace import TRACE, TraceFile


class RunDirectory:
    """run.dir (default runs/<name>-<time>) with its sinks and checkpoint store.

    Raises ValueError where a run, or another run's checkpoints, would be overwritten, where --resume finds no run, and
    where one of the outputs cannot be written: every place is tried before there is any work to lose.
    """

    def __init__(self, config: Config, resume: bool) -> None:
        self.config = config
        name = f"runs/{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.path = Path(config.run.dir or name).expanduser()
        self.model = self.path / "model"
        self._checkpointed = self.path / "checkpointed"
        metrics = self.path / "metrics.jsonl"
        for output in (self.path, self.path / "rollouts", self.model, self.path / "profile"):
            check_writable(output, "run.dir")
        if resume and not config.run.dir:
            raise ValueError("--resume needs run.dir: add --run.dir <directory of the run>")
        if resume and not metrics.exists():
            raise ValueError(f"--resume: run.dir = {str(self.path)!r} holds no run: correct it, or leave --resume out")
        if not resume and metrics.exists() and metrics.stat().st_size > 0:
            raise ValueError(f"run.dir = {str(self.path)!r} holds a run already: add --resume, or give another run.dir")
        self.store = CheckpointStore(config.checkpoint.dir or str(self.path / "checkpoints"), config.checkpoint.keep)
        if not resume and (names := self.store.list()):
            raise ValueError(
                f"checkpoint.dir = {self.store.dir!r} holds checkpoints of another run ({names[-1]} is the newest):"
                " give another checkpoint.dir or run.dir, or go on with that run by --resume"
            )
        check_writable(self.store.dir, "checkpoint.dir")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.metrics = JsonlSink(metrics, check=validate)
            self.evals = JsonlSink(self.path / "eval.jsonl")
            self.trace = TraceFile(self.path / TRACE, config.track.trace)
            self.rollouts = RolloutRecorder(self.path / "rollouts")
        except OSError as error:
            raise ValueError(f"run.dir = {str(self.path)!r} cannot be used: {error}") from error
        if not resume:
            self.truncate(-1)  # an evaluation may have been written before the first step

    def checkpoint_to_resume(self) -> str | None:
        """checkpoint.resume_from or the newest one. None if the run ended before its first: it begins again."""
        names, wanted = self.store.list(), self.config.checkpoint.resume_from
        if wanted and wanted not in names:
            raise ValueError(f"checkpoint.resume_from = {wanted!r}: there is {', '.join(names) or 'none'}")
        if not names and self._checkpointed.exists():
            before = self._checkpointed.read_text().strip()
            raise ValueError(
                f"--resume: this run wrote checkpoints to {before}, but {self.store.dir} holds none: set"
                " checkpoint.dir to where they are, or start again in another run.dir"
            )
        return wanted or (names[-1] if names else None)

    def on_checkpoint(self) -> None:
        """A checkpoint was committed: from now on a run without one is not one that ended early."""
        if not self._checkpointed.exists():
            atomic_write_text(self._checkpointed, f"{self.store.dir}\n")

    def truncate(self, step: int, held: Collection[int] = (), trace_bytes: int = 0) -> None:
        """Forget what was written after `step`: a run that goes on from there writes it again.

        `held`: groups that are in the cache again, though they may have been recorded as dropped since. `trace_bytes`:
        size of the trace in the checkpoint, which may have been taken in the middle of a step. ValueError, and nothing
        is changed, if the metrics do not reach `step`: they are not those of the run of the checkpoint.
        """
        if step > 0 and all(row["step"] != step for row in self.metrics.rows()):
            raise ValueError(
                f"{self.metrics.path} does not reach step {step}, where the checkpoint was taken: rows are missing."
                " Restore the file, or start a new run in another run.dir"
            )
        self.metrics.truncate(step)
        self.evals.truncate(step)
        self.trace.truncate(trace_bytes)
        self.rollouts.truncate(step, held)
        if step >= 0:
            self.store.discard_after(checkpoint_name(step))

    def write_config(self) -> None:
        atomic_write_text(self.path / "config.resolved.json", self.config.model_dump_json(indent=2) + "\n")

    def resume_command(self, command: list[str]) -> str:
        """What to type in a shell to go on with this run; `command` is what was typed after `train`."""
        python, script = Path(sys.executable), shutil.which("rollover")
        if script is not None and Path(script).parent == python.parent:
            program = ["rollover"]
        else:  # the environment is not activated, or another one's script would answer
            program = [str(python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python)]
            program += ["-m", "rollover"]
        words = [w for w in command if not w.startswith(("--run.dir=", "--checkpoint.resume_from="))]
        return shlex.join([*program, "train", *words, f"--run.dir={self.path}", "--resume"])
