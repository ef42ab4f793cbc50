"""The directory of one run: its files, whether this run may use it, and the command that resumes it.

    config.resolved.json  metrics.jsonl  eval.jsonl  trace.jsonl  rollouts/  checkpoints/  journal/  model/  logs/
    evaluations/ (every answer)  best_model/  tokenizer.json
    media/ (images of tasks that have no file)
    tracked_as (run ids of external trackers)
    lock (held while the process lives)  checkpointed (where its checkpoints are)  finished (at which step)
    resume.json (the command that resumes, and its folder)

Owns the paths. Never decides what is written, nor when.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollover.checkpoint.journal import holds_data
from rollover.checkpoint.storage import checkpoint_name
from rollover.checkpoint.store import CheckpointStore
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
from rollover.run.run_files import CONFIG, EVALUATIONS, FINISHED, LOCK, METRICS, RESUME, DirectoryLock
from rollover.text import one_line
from rollover.track.build import build_trackers
from rollover.track.jsonl import EvalFile, MetricsFile, early_stop_reason
from rollover.track.records import step_of
from rollover.track.trace import TRACE
from rollover.track.tracker import Cut

logger = logging.getLogger(__name__)

_CHECKPOINTED = "checkpointed"
_SHARED = "on_their_way"  # files of remote checkpoints, for ranks on other machines
_FILES = (CONFIG, METRICS, "metrics.parquet", EVALUATIONS, TRACE, LOCK, _CHECKPOINTED, FINISHED, RESUME)


class RunDirectory:
    """run.dir (default runs/<name>-<time>) with its trackers and checkpoint store.

    Raises ValueError where a run, or another run's checkpoints, would be overwritten, where --resume finds no run, and
    where an output cannot be written: every path is checked before there is any work to lose.
    """

    def __init__(self, config: Config, resume: bool, command: list[str] | None = None) -> None:
        """`command`: the words after the verb, for `resume_command`; None: called by a program."""
        self.config, self.resume, self._command = config, resume, command
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
        self.evaluation_files = EvaluationFiles(self.path)
        metrics = self.path / METRICS
        shared = self.path / _SHARED if config.backend.type == "ranks" else None
        self.store = CheckpointStore(
            config.checkpoint.dir or str(self.path / "checkpoints"), config.checkpoint.keep, shared
        )
        self.mirror = self.store.mirror(self.path)
        self.fetched_from = ""  # the mirror that the run's files come from, if its machine was lost
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
            self.close()  # a stored error keeps this object alive
            raise
        self.metrics, self.evals = self.trackers.of_type(MetricsFile), self.trackers.of_type(EvalFile)

    def _open(self, lost: bool) -> None:
        """Lock the directory, and open its files. `lost`: the run's files are only in the mirror."""
        config = self.config
        self.path.mkdir(parents=True, exist_ok=True)
        self.locks.append(DirectoryLock(self.path, "run.dir"))
        shutil.rmtree(self.path / _SHARED, ignore_errors=True)  # left by a process that was killed
        if config.checkpoint.dir and (folder := self.store.local_folder) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if not folder.samefile(self.path):
                self.locks.append(DirectoryLock(folder, "checkpoint.dir"))
        if not self.resume:
            self._refuse_other_runs()  # another start may have written and ended since
        if lost and self.mirror is not None:
            self.mirror.fetch()
            self.fetched_from = self.mirror.root
        self.trackers = build_trackers(config, self.path)
        earlier = self._earlier_config() if self.resume else {}
        self.changes = resume_rules.changes(earlier, config)
        self.decided_dtype = earlier.get("model", {}).get("dtype", "")  # for model.dtype = "auto"
        if self.resume and self.checkpoint_to_resume() is not None:
            resume_rules.refuse(self.changes)

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def logs(self) -> Path:
        """Output of child processes."""
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
                " give another checkpoint.dir or run.dir, or continue that run with --resume"
            )
        if self.mirror is not None and METRICS in self.mirror.files():
            raise ValueError(
                f"checkpoint.dir = {self.store.dir!r} holds the files of another run, which had no checkpoint yet: give"
                " another checkpoint.dir, or continue that run with --resume"
            )

    def checkpoint_to_resume(self) -> str | None:
        """Return checkpoint.resume_from or the newest checkpoint. None if the run ended before its first one."""
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
        """Return whether no checkpoint is later than `name`."""
        return self.store.list()[-1:] == [name]

    def on_checkpoint(self) -> None:
        """Note where checkpoints are, after a commit: a later start that finds none there must fail."""
        if not (self.path / _CHECKPOINTED).exists():
            atomic_write_text((self.path / _CHECKPOINTED), f"{self.store.dir}\n")

    def on_begun(self) -> None:
        """Note that the run has begun: after a loss of its backend it resumes from this directory."""
        self.resume, self._resume_from, self.changes = True, "", []

    def on_restart(self) -> None:
        """Begin another copy of the run's files, as a process that resumes does."""
        self.mirror = self.store.mirror(self.path)

    def end(self, step: int, used_up: str, early_stop: str = "") -> None:
        """Mark the run as finished at `step`.

        `used_up`: what ran out before the last step, or "". `early_stop`: the reason by eval.patience, or "".
        """
        end = {"step": step, "used_up": used_up, **({"enough": early_stop} if early_stop else {})}
        atomic_write_text(self.path / FINISHED, json.dumps(end) + "\n")

    def finished_notice(self) -> str | None:
        """Return the message for a start that resumes a finished run without more steps; None for all others."""
        path = self.path / FINISHED
        if not path.exists():
            return None
        with _optional():
            end = read_object(path, step=int, used_up=str)
        if self.checkpoint_to_resume() not in (None, checkpoint_name(end["step"])):
            return None
        run = f"this run is finished: {end['step']} steps are trained"
        if self.config.train.num_steps <= end["step"]:
            return f"{run}, and train.num_steps = {self.config.train.num_steps}. Raise it to continue"
        if reason := early_stop_reason(self.evals.rows(), self.config.eval):
            return f"{run}, and {reason}. Raise eval.patience, or set it to 0, to continue"
        if end["used_up"] and not self.tasks_changed:
            return f"{run}, and the {end['used_up']} are used up. Start a new run, or raise tasks.epochs of a data set"
        return None

    @property
    def tasks_changed(self) -> bool:
        """Whether [tasks] differs from the start before this one."""
        return any(change.key.startswith("tasks.") for change in self.changes)

    def truncate(self, cut: Cut) -> None:
        """Delete what was written after `cut`: a run that resumes there writes it again.

        ValueError, and nothing is changed, if the metrics do not reach its step. An empty file of metrics is reported.
        """
        step, path = cut.step, self.metrics.path
        if step > 0 and not self.metrics.reaches(step):
            if path.stat().st_size:
                raise ValueError(
                    f"{path} has no row of step {step}, from which this run continues: rows are missing. Restore the"
                    " file, or delete it to continue without the rows up to there"
                )
            logger.warning(f"{path} is missing or empty: the rows of steps 1 to {step} are lost")
        (self.path / FINISHED).unlink(missing_ok=True)
        if step >= 0:
            # Before their rows are deleted: a checkpoint that the metrics do not reach cannot be resumed.
            self.store.discard_after(checkpoint_name(step))
        self.evaluation_files.delete_after(step)
        self.trackers.truncate(cut)

    def write_config(self, *, replace: bool = False) -> None:
        """Write config.resolved.json; keep that of a start with other settings as config.resolved.1.json, ...2.

        `replace`: replace the one of this start, whose settings were changed.
        """
        path = self.path / CONFIG
        if path.exists() and self.resume and not replace:
            if not self.changes:
                return
            kept = (self.path / f"config.resolved.{n}.json" for n in itertools.count(1))
            # Copied, not renamed: after a kill in between, the next start needs the settings to compare with.
            atomic_write_text(next(p for p in kept if not p.exists()), path.read_text())
        atomic_write_text(path, self.config.model_dump_json(indent=2) + "\n")

    def write_resume(self) -> None:
        """Write resume.json: the command that resumes, and its folder."""
        resume = {"command": self.resume_command, "folder": start_folder()}
        atomic_write_text(self.path / RESUME, json.dumps(resume, indent=2) + "\n")

    def write_tokenizer(self, tokenizer: Any) -> None:
        """Write tokenizer.json, to decode the tokens of records elsewhere. Slow tokenizers have none."""
        core, path = getattr(tokenizer, "backend_tokenizer", None), self.path / "tokenizer.json"
        if core is not None and not path.exists():
            atomic_write_text(path, core.to_str())

    def write_model_card(self, folder: Path, step: int, evaluation: Mapping[str, Any] | None) -> None:
        """Write the card (README.md) of the model in `folder`, trained up to `step`, with tags for the hub.

        `evaluation`: its row of eval.jsonl, if any. ValueError where the card cannot be written.
        """
        if not folder.is_dir() or self.config.backend.type == "tinker":
            return  # the service has the model, or a custom backend wrote no folder
        try:
            (folder / "README.md").write_text(_model_card(self.config, step, evaluation), encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"{folder / 'README.md'} cannot be written: {error.strerror}. The model beside it is whole. Make room,"
                " or remove what is in its place, and resume with --resume"
            ) from error

    def _earlier_config(self) -> dict[str, Any]:
        """Return the settings of the start before this one; {} if their file is missing."""
        path = self.path / CONFIG
        with _optional():
            return read_tables(path) if path.exists() else {}

    @property
    def resume_command(self) -> str:
        """The shell command that resumes this run.

        For a program a call in Python, to be made with the functions and tasks that were given as objects.
        """
        if self._command is None:
            trust = ", trust=True" if any(named(self.config.model_dump())) else ""
            return f"rollover.train(resume={str(self.path)!r}{trust})"
        words = [w for w in self._command if not w.startswith(("--run.dir=", "--checkpoint.resume_from="))]
        verb = "sft" if self.config.algorithm.supervised else "train"
        return shlex.join([*_program(), verb, *words, f"--run.dir={self.path}", "--resume"])


def _holds_run(path: Path) -> bool:
    """Return whether there is a run to resume, even without its metrics."""
    checkpoints = (path / _CHECKPOINTED).exists() or any((path / "checkpoints").glob("step-*"))
    return checkpoints or holds_data(path / "journal")


def view_command(run_dir: Path) -> str:
    """Return the shell command that opens the dashboard of the run."""
    return shlex.join([*_program(), "view", str(run_dir)])


def _program() -> list[str]:
    """Return the words that call this program in a shell."""
    python, script = Path(sys.executable), shutil.which("rollover")
    if script is not None and Path(script).parent == python.parent:
        return ["rollover"]
    # The environment is not activated: another one's script might run.
    return [short_path(python), "-m", "rollover"]


def _new_directory(name: str) -> Path:
    """Make runs/<name>-<time>, with -2, -3, ... where another start of the same second has made it."""
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
    """Add to an error of a damaged file that the file may be deleted."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"--resume: {error}, or delete it to continue without its contents") from error


def _model_card(config: Config, step: int, evaluation: Mapping[str, Any] | None) -> str:
    """Return a model card. `base_model` is set for a model of the hub only: a local path means nothing elsewhere."""
    supervised = config.algorithm.supervised
    kinds = ["reinforcement-learning", config.algorithm.preset, config.algorithm.advantage]
    kinds = ["sft"] if supervised else list(dict.fromkeys(kinds))
    of_hub = not Path(config.model.path).exists() and config.model.path.count("/") == 1
    head: dict[str, Any] = {"base_model": config.model.path} if of_hub else {}
    head |= {"library_name": "transformers", "tags": ["rollover", *kinds]}
    of_rollouts = {
        "Advantage, loss": f"{config.algorithm.advantage}, {config.algorithm.loss}",
        "Groups a step, rollouts a group": f"{config.rollout.groups_per_step}, {config.rollout.group_size}",
    }
    rows = {
        "Base model": Path(config.model.path).name if not of_hub else config.model.path,
        "Steps": str(step),
        **({"Examples a step": str(config.sft.batch_examples)} if supervised else of_rollouts),
        "Learning rate": f"{config.train.learning_rate:g}",
        "LoRA rank": str(config.model.lora.rank or ""),
        "Held-out mean reward": f"{evaluation['mean']:.3f}" if evaluation and "mean" in evaluation else "",
    }
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", ""]
    lines += [f"# {_cell(config.run.name)}", "", "Trained with Rollover.", "", "| | |", "|---|---|"]
    lines += [f"| {what} | {_cell(value)} |" for what, value in rows.items() if value]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return `text` escaped for a cell of a Markdown table."""
    return one_line(text).replace("|", "\\|").replace("<", "&lt;")


_BEST = "evaluation.json"  # in the model's folder, written last


class EvaluationFiles:
    """`evaluations/` and `best_model/` in the directory of a run. A half-written model does not count."""

    def __init__(self, run: Path) -> None:
        self.answers, self.best_model = run / "evaluations", run / "best_model"

    def answers_file(self, step: int) -> Path:
        """Return the path for all answers of the evaluation after this step, and make its folder."""
        self.answers.mkdir(exist_ok=True)
        return self.answers / f"step-{step:06d}.jsonl"

    @property
    def best_model_step(self) -> int | None:
        """The step of the best model; None where there is none, or it is half-written."""
        path = self.best_model / _BEST
        return read_object(path, step=int)["step"] if path.exists() else None

    def on_best_model(self, step: int) -> None:
        """Mark the best model as complete, with its step."""
        atomic_write_text(self.best_model / _BEST, json.dumps({"step": step}) + "\n")

    def delete_best_model(self) -> None:
        """Delete it; it does not count from the first moment on."""
        (self.best_model / _BEST).unlink(missing_ok=True)
        shutil.rmtree(self.best_model, ignore_errors=True)

    def delete_after(self, step: int) -> None:
        """Delete files of later steps."""
        for file in self.answers.glob("step-*.jsonl"):
            if (step_of(file.name) or 0) > step:
                file.unlink()
        if (self.best_model_step or 0) > step:
            self.delete_best_model()
