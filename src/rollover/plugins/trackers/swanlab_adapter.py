"""SwanLab: one experiment by id, with the step as its step.

Project, workspace and mode come from the configuration or from SwanLab's variables (SWANLAB_PROJ_NAME,
SWANLAB_WORKSPACE, SWANLAB_MODE). Its files are in <run.dir>/swanlog, or SWANLAB_LOG_DIR. A resumed run sends everything
again: offline into new files that replace the old ones; online SwanLab ignores each key's steps up to its last one, so
steps after a rollback keep their old values.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import swanlab  # pyright: ignore[reportMissingImports]

from rollover.plugins.trackers.adapter import About, Adapter, LastSteps
from rollover.track.tracker import Cut


class SwanLab(Adapter):
    """`place`: the folder for `swanlab sync`, or the project."""

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self._folder = Path(os.environ.get("SWANLAB_LOG_DIR") or about.directory / "swanlog")
        self._is_open = False

    def truncate(self, cut: Cut) -> None:
        self._end("success")
        about, project = self.about, self.about.project_or("SWANLAB_PROJ_NAME")
        here = os.environ.get("SWANLAB_MODE", "") in ("offline", "local")
        if here:
            for old in self._folder.glob(f"run-*-{about.id}"):
                shutil.rmtree(old)
        swanlab.init(
            project=project,
            workspace=about.entity or None,
            name=about.name,
            group=about.group or None,
            tags=list(about.tags) or None,
            config=dict(about.config),
            log_dir=str(self._folder),
            id=about.id,
            resume="allow",
        )
        self._is_open, self.last_steps = True, LastSteps()
        self.place = f"{self._folder} (for swanlab sync)" if here else f"project {project} of SwanLab"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        swanlab.log(numbers, step=step)

    def show(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        swanlab.log({name: [_text(row) for row in rows]}, step=step)

    def on_artifact(self, name: str, files: Mapping[str, Path]) -> None:
        for file in files.values():
            swanlab.save(glob.escape(str(file)), base_path=str(self.about.directory), policy="now")

    def close(self) -> None:
        self._end("crashed" if self.failed else "success")

    def _end(self, state: str) -> None:
        if self._is_open:
            swanlab.finish(state)
            self._is_open = False


def _text(row: Mapping[str, Any]) -> Any:
    return swanlab.Text("\n".join(f"{key}: {value}" for key, value in row.items()))
