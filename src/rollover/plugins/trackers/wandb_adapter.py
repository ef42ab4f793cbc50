"""Weights & Biases: one run by id, with the step as its step.

Project, entity and mode come from the configuration or from W&B's variables (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE,
WANDB_BASE_URL). Its files are in <run.dir>/wandb, or WANDB_DIR. After a rollback, offline files are written again with
all steps; an online run is rewound. If the server cannot rewind, old steps stay, and new ones follow after the last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]

from rollover.plugins.trackers.adapter import About, Adapter, LastSteps
from rollover.track.tracker import Cut


class Wandb(Adapter):
    """`place`: the address of the run, or the folder for `wandb sync`."""

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self._folder = Path(os.environ.get("WANDB_DIR") or about.directory)
        self._run: Any = None
        self._offline = False

    def truncate(self, cut: Cut) -> None:
        self._end()
        self._offline = wandb.setup().settings.mode in ("offline", "dryrun")
        if self._offline:
            for old in self._folder.glob(f"wandb/offline-run-*-{self.about.id}"):
                shutil.rmtree(old)
            self._run = self._begin()
            self.place = f"{self._run.settings.sync_dir} (for wandb sync)"
            self.last_steps = LastSteps()
            return
        run = self._begin(resume="allow")
        if 0 <= cut.step < run.step - 1:
            run.finish()
            run = None
            with contextlib.suppress(Exception):  # boundary: not every server supports rewinding
                run = self._begin(resume_from=f"{self.about.id}?_step={cut.step}")
            run = run or self._begin(resume="allow")
        self._run, self.place = run, run.url or ""
        self.last_steps = LastSteps(run.step - 1, run.step - 1) if run.step else LastSteps()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(numbers, step=step)

    def show(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows], allow_mixed_types=True)
        self._run.log({name: table}, step=step)

    def on_artifact(self, name: str, files: Mapping[str, Path]) -> None:
        artifact = wandb.Artifact(f"{self.about.file_name}-{name}", type="records" if name == "records" else "model")
        for path, file in files.items():
            artifact.add_file(str(file), name=path, policy="immutable", skip_cache=True)
        logged = self._run.log_artifact(artifact)
        if not self._offline:
            logged.wait()

    def close(self) -> None:
        self._end(1 if self.failed else 0)

    def _begin(self, **how: Any) -> Any:
        about = self.about
        return wandb.init(
            id=about.id,
            name=about.name,
            project=about.project_or("WANDB_PROJECT"),
            entity=about.entity or None,
            group=about.group or None,
            tags=list(about.tags) or None,
            config=dict(about.config),
            dir=str(self._folder),
            # Console output and load are the run's: it is the parent process.
            settings=wandb.Settings(console="off", silent=True, x_stats_pid=os.getppid(), save_code=False),
            **how,
        )

    def _end(self, code: int = 0) -> None:
        if self._run is not None:
            self._run.finish(exit_code=code)
            self._run = None
