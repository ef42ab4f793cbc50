"""The directory of one run: its files, whether this run may use it, and the command that goes on with it.

    config.resolved.json  metrics.jsonl  eval.jsonl  trace.jsonl  rollouts/  checkpoints/  journal/  model/  logs/
    evaluations/ (every answer)  best_model/  tokenizer.json
    media/ (images of tasks that have no file)
    tracked_as (by tools of others)
    lock (held while the run lives)  checkpointed (where its checkpoints are)  finished (at which step)
    resume.json (what to type to go on, and where)

Owns where things lie. Never decides what is written, nor when.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollover.checkpoint.journal import holds_data
from rollover.checkpoint.store import CheckpointStore, checkpoint_name
from rollover.config import Config
from rollover.config import resume as resume_rules
from rollover.config.trust import named
from rollover.files import (
    atomic_write_text,
    check_writable,
    local_path,
    read_object,
    read_tables,
    short_path,
    start_folder,
)
from rollover.run.best import why_enough
from rollover.run.lock import LOCK, DirectoryLock
from rollover.run.run_files import CONFIG, EVALUATIONS, FINISHED, METRICS, RESUME
from rollover.track.build import build_trackers
from rollover.track.jsonl import EvalFile, MetricsFile
from rollover.track.recorded import step_of
from rollover.track.trace import TRACE
from rollover.track.tracker import Cut

logger = logging.getLogger(__name__)

_CHECKPOINTED = "checkpointed"
_SHARED = "on_their_way"  # files of remote checkpoints, where ranks on other machines see them
_FILES = (CONFIG, METRICS, "metrics.parquet", EVALUATIONS, TRACE, LOCK, _CHECKPOINTED, FINISHED, RESUME)


class RunDirectory:
    """run.dir (default runs/<name>-<time>) with its trackers and checkpoint store.

    Raises ValueError where a run, or another run's checkpoints, would be overwritten, where --resume finds no run, and
    where one of the outputs cannot be written: every place is tried before there is any work to lose.
    """

    def __init__(self, config: Config, resume: bool) -> None:
        self.config, self.resume = config, resume
        self._resume_from = config.checkpoint.resume_from
        if resume and not config.run.dir:
            raise ValueError("--resume needs run.dir: add --run.dir <directory of the run>")
        self.path = local_path(config.run.dir) if config.run.dir else _new_directory(config.run.name)
        for output in (
            self.path,
            *(
                self.path / name
                for name in ("rollouts", "journal", "model", "profile", "logs", "evaluations", "best_model", "media")
            ),
        ):
            check_writable(output, "run.dir")
        for name in _FILES:
            if (self.path / name).exists() and not (self.path / name).is_file():
                raise ValueError(
                    f"run.dir = {str(self.path)!r} cannot be used: {name} in it is a folder, a device or a pipe, and a"
                    " run writes a file of that name. Remove it, or give another run.dir"
                )
        self.of_evaluations = EvaluationFiles(self.path)
        metrics = self.path / METRICS
        shared = self.path / _SHARED if config.backend.type == "ranks" else None
        self.store = CheckpointStore(
            config.checkpoint.dir or str(self.path / "checkpoints"), config.checkpoint.keep, shared
        )
        self.mirror = self.store.mirror(self.path)
        self.fetched_from = ""  # where the files of this run come from, if its machine was lost
        lost = resume and not metrics.exists() and self.mirror is not None and bool(self.mirror.files())
        if resume and not (lost or metrics.exists() or _holds_run(self.path)):
            raise ValueError(f"--resume: run.dir = {str(self.path)!r} holds no run: correct it, or leave --resume out")
        if not resume:
            self._refuse_other_runs()
        check_writable(self.store.dir, "checkpoint.dir")
        self.locks: list[DirectoryLock] = []
        try:
            self._open(lost)
        except OSError as error:
            self.close()
            raise ValueError(f"run.dir = {str(self.path)!r} cannot be used: {error}") from error
        except BaseException:
            self.close()  # who keeps the error keeps this object, too
            raise
        self.metrics, self.evals = self.trackers.the(MetricsFile), self.trackers.the(EvalFile)

    def _open(self, lost: bool) -> None:
        """Lock the directory, and open what is written there. `lost`: it has none of the run's files."""
        config = self.config
        self.path.mkdir(parents=True, exist_ok=True)
        self.locks.append(DirectoryLock(self.path, "run.dir"))
        shutil.rmtree(self.path / _SHARED, ignore_errors=True)  # of a process that was killed
        if config.checkpoint.dir and (folder := self.store.local_folder) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if not folder.samefile(self.path):
                self.locks.append(DirectoryLock(folder, "checkpoint.dir"))
        if not self.resume:
            self._refuse_other_runs()  # one may have ended while the other waited for nothing
        if lost and self.mirror is not None:
            self.mirror.fetch()
            self.fetched_from = self.mirror.root
        self.trackers = build_trackers(config, self.path)
        earlier = self._earlier_config() if self.resume else {}
        self.changes = resume_rules.changes(earlier, config)
        self.decided_dtype = earlier.get("model", {}).get("dtype", "")  # for a start that leaves it to the machine
        if self.resume and self.checkpoint_to_resume() is not None:
            resume_rules.refuse(self.changes)

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def logs(self) -> Path:
        """Of what other processes print."""
        return self.path / "logs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def close(self) -> None:
        """Release the locks: another run may use the directory."""
        for lock in self.locks:
            lock.release()

    def _refuse_other_runs(self) -> None:
        metrics = self.path / METRICS
        if (metrics.exists() and metrics.stat().st_size > 0) or holds_data(self.journal):
            raise ValueError(f"run.dir = {str(self.path)!r} holds a run already: add --resume, or give another run.dir")
        if names := self.store.list():
            raise ValueError(
                f"checkpoint.dir = {self.store.dir!r} holds checkpoints of another run ({names[-1]} is the newest):"
                " give another checkpoint.dir or run.dir, or go on with that run by --resume"
            )
        if self.mirror is not None and METRICS in self.mirror.files():
            raise ValueError(
                f"checkpoint.dir = {self.store.dir!r} holds the files of another run, which had no checkpoint yet: give"
                " another checkpoint.dir, or go on with that run by --resume"
            )

    def checkpoint_to_resume(self) -> str | None:
        """The name of checkpoint.resume_from or of the newest one. None if the run ended before its first one."""
        names, wanted = self.store.list(), self._resume_from
        if wanted and wanted not in names:
            raise ValueError(f"checkpoint.resume_from = {wanted!r}: there is {', '.join(names) or 'none'}")
        if not names and (self.path / _CHECKPOINTED).exists():
            before = (self.path / _CHECKPOINTED).read_text(errors="replace").strip()
            raise ValueError(
                f"--resume: this run wrote checkpoints to {before}, but {self.store.dir} holds none: set"
                " checkpoint.dir to where they are, or start again in another run.dir"
            )
        return wanted or (names[-1] if names else None)

    def is_newest(self, name: str) -> bool:
        """Whether no checkpoint is later than `name`."""
        return self.store.list()[-1:] == [name]

    def on_checkpoint(self) -> None:
        """A checkpoint was committed. Where is written down: a start that finds none there later must not take this for
        a run that ended before its first one."""
        if not (self.path / _CHECKPOINTED).exists():
            atomic_write_text((self.path / _CHECKPOINTED), f"{self.store.dir}\n")

    def on_begun(self) -> None:
        """The run has begun, or goes on: should its backend be lost, it goes on from what is here by then."""
        self.resume, self._resume_from, self.changes = True, "", []

    def on_restart(self) -> None:
        """As for a process that goes on with the run: it makes a copy of its own of the run's files."""
        self.mirror = self.store.mirror(self.path)

    def end(self, step: int, used_up: str, enough: str = "") -> None:
        """The run is finished at `step`, its files are whole. `used_up`: what ran out before the last step, or "".
        `enough`: why it ended before that by eval.patience, or ""."""
        end = {"step": step, "used_up": used_up, **({"enough": enough} if enough else {})}
        atomic_write_text(self.path / FINISHED, json.dumps(end) + "\n")

    def why_finished(self) -> str | None:
        """What to tell who resumes a run that is finished, and whose configuration asks for no more; else None."""
        path = self.path / FINISHED
        if not path.exists():
            return None
        with _optional():
            end = read_object(path, step=int, used_up=str)
        if self.checkpoint_to_resume() not in (None, checkpoint_name(end["step"])):
            return None
        run = f"this run is finished: {end['step']} steps are trained"
        if self.config.train.num_steps <= end["step"]:
            return f"{run}, and train.num_steps = {self.config.train.num_steps}. Raise it to go on"
        if enough := why_enough(self.evals.rows(), self.config.eval):
            return f"{run}, and {enough}. Raise eval.patience, or set it to 0, to go on"
        if end["used_up"] and not self.tasks_changed:
            return f"{run}, and the {end['used_up']} are used up. Start a new run, or raise tasks.epochs of a data set"
        return None

    @property
    def tasks_changed(self) -> bool:
        """Whether this start has other [tasks] than the one before it."""
        return any(change.key.startswith("tasks.") for change in self.changes)

    def truncate(self, cut: Cut) -> None:
        """Forget what was written after `cut`: a run that goes on from there writes it again.

        ValueError, and nothing is changed, if the metrics do not reach its step: they are not those of the run that
        goes on. Metrics without any row are reported: their file was deleted.
        """
        step, path = cut.step, self.metrics.path
        if step > 0 and not self.metrics.reaches(step):
            if path.stat().st_size:
                raise ValueError(
                    f"{path} has no row of step {step}, from which this run goes on: rows are missing. Restore the"
                    " file, or delete it to go on without the rows up to there"
                )
            logger.warning(f"{path} is missing or empty: the rows of steps 1 to {step} are lost")
        (self.path / FINISHED).unlink(missing_ok=True)
        if step >= 0:
            # Before the rows of their steps go: a checkpoint that the metrics do not reach cannot be resumed.
            self.store.discard_after(checkpoint_name(step))
        self.of_evaluations.forget_after(step)
        self.trackers.truncate(cut)

    def write_config(self, *, replace: bool = False) -> None:
        """Write config.resolved.json. That of a start with other settings is kept as config.resolved.1.json, ...2.

        `replace`: that of this start is replaced, as the run goes on with other settings.
        """
        path = self.path / CONFIG
        if path.exists() and self.resume and not replace:
            if not self.changes:
                return
            kept = (self.path / f"config.resolved.{n}.json" for n in itertools.count(1))
            # Copied, not renamed: a kill in between must leave the settings that the next start is compared with.
            atomic_write_text(next(p for p in kept if not p.exists()), path.read_text())
        atomic_write_text(path, self.config.model_dump_json(indent=2) + "\n")

    def write_resume(self, command: str) -> None:
        """Write resume.json: what to type to go on (`resume_command`), and in which folder, for whoever sees a run that
        was killed."""
        told = {"command": command, "folder": start_folder()}
        atomic_write_text(self.path / RESUME, json.dumps(told, indent=2) + "\n")

    def _earlier_config(self) -> dict[str, Any]:
        """The settings of the start before this one; {} if their file is gone."""
        path = self.path / CONFIG
        with _optional():
            return read_tables(path) if path.exists() else {}

    def resume_command(self, command: list[str] | None) -> str:
        """What to type in a shell to go on with this run; `command` is what was typed after the verb.

        None: what to call in Python, with the functions and tasks that were given as objects.
        """
        if command is None:
            trust = ", trust=True" if any(named(self.config.model_dump())) else ""
            return f"rollover.train(resume={str(self.path)!r}{trust})"
        words = [w for w in command if not w.startswith(("--run.dir=", "--checkpoint.resume_from="))]
        verb = "sft" if self.config.algorithm.supervised else "train"
        return shlex.join([*_program(), verb, *words, f"--run.dir={self.path}", "--resume"])


def _holds_run(path: Path) -> bool:
    """Whether there is a run to resume, even without its metrics."""
    checkpoints = (path / _CHECKPOINTED).exists() or any((path / "checkpoints").glob("step-*"))
    return checkpoints or holds_data(path / "journal")


def view_command(run_dir: Path) -> str:
    """What to type in a shell to see the run in a browser."""
    return shlex.join([*_program(), "view", str(run_dir)])


def _program() -> list[str]:
    """The words that call this program in a shell."""
    python, script = Path(sys.executable), shutil.which("rollover")
    if script is not None and Path(script).parent == python.parent:
        return ["rollover"]
    # The environment is not activated, or another one's script would answer.
    return [short_path(python), "-m", "rollover"]


def _new_directory(name: str) -> Path:
    """Make runs/<name>-<time>; where another start of the same second has made that, with -2, -3 and so on."""
    first = local_path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    check_writable(first, "run.dir")
    first.parent.mkdir(parents=True, exist_ok=True)
    path, n = first, 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            n += 1
            path = first.with_name(f"{first.name}-{n}")


@contextlib.contextmanager
def _optional() -> Iterator[None]:
    """A damaged file that is read in the block may be deleted."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"--resume: {error}, or delete it to go on without what it says") from error


_BEST = "evaluation.json"  # in the model's folder, written last


class EvaluationFiles:
    """`evaluations/` and `best_model/` in the directory of a run."""

    def __init__(self, run: Path) -> None:
        self.answers, self.best_model = run / "evaluations", run / "best_model"

    def answers_of(self, step: int) -> Path:
        """The file of all answers of the evaluation after this step; its folder is there."""
        self.answers.mkdir(exist_ok=True)
        return self.answers / f"step-{step:06d}.jsonl"

    @property
    def best_model_step(self) -> int | None:
        """After which step the best model was written; None where there is none, or half of one."""
        path = self.best_model / _BEST
        return read_object(path, step=int)["step"] if path.exists() else None

    def on_best_model(self, step: int) -> None:
        """It is whole, and of this step."""
        atomic_write_text(self.best_model / _BEST, json.dumps({"step": step}) + "\n")

    def forget_best_model(self) -> None:
        """Delete it; from the first moment on it is none."""
        (self.best_model / _BEST).unlink(missing_ok=True)
        shutil.rmtree(self.best_model, ignore_errors=True)

    def forget_after(self, step: int) -> None:
        """Delete what is of later steps: they did not happen."""
        for file in self.answers.glob("step-*.jsonl"):
            if (step_of(file.name) or 0) > step:
                file.unlink()
        if (self.best_model_step or 0) > step:
            self.forget_best_model()
