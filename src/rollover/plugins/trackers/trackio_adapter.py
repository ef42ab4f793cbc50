"""trackio: one run of a project, by name and id. Rollouts are traces.

trackio's variables choose the store (TRACKIO_DIR; TRACKIO_SPACE_ID, TRACKIO_SERVER_URL). After a rollback a local run
is deleted and sent again; a remote run cannot be changed, so its later steps stay, and new ones follow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio  # pyright: ignore[reportMissingImports]
from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

from rollover.plugins.trackers.adapter import About, Adapter, LastSteps
from rollover.track.tracker import Cut

_RENAMED = {"time": "time_"}  # trackio reserves "time"


class Trackio(Adapter):
    """`place`: the command that shows the run, or the project."""

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self._project = about.project_or("TRACKIO_PROJECT")
        self._name = f"{about.name}-{about.id[:4]}"  # trackio's key of a run
        self._run: Any = None

    def truncate(self, cut: Cut) -> None:
        self.close()
        remote = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        if not remote:
            self.last_steps = self._stored()
            if max(self.last_steps) > cut.step:
                SQLiteStorage.delete_run(self._project, self._name)
                self.last_steps = LastSteps()
        about = self.about
        self._run = trackio.init(
            project=self._project,
            name=self._name,
            group=about.group or None,
            config={**about.config, "tags": list(about.tags)},
            resume="allow",
            embed=False,
            auto_log_cpu=False,
        )
        if remote:
            last = getattr(self._run, "_next_step", 0) - 1
            self.last_steps = LastSteps(last, last)
        self.place = f"project {self._project} of {remote}" if remote else f"trackio show --project {self._project}"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({_RENAMED.get(key, key): value for key, value in numbers.items()}, step=step)

    def show(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        answer = "completion" if name == "rollouts" else "answer"
        self._run.log({name: [_trace(row, answer) for row in rows]}, step=step)

    def on_artifact(self, name: str, files: Mapping[str, Path]) -> None:
        artifact = trackio.Artifact(f"{self.about.file_name}-{name}", type="records" if name == "records" else "model")
        for path, file in files.items():
            artifact.add_file(file, name=path)
        self._run.log_artifact(artifact)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _stored(self) -> LastSteps:
        row = evaluation = -1
        for log in SQLiteStorage.get_logs(self._project, self._name):
            if "policy_version" in log:
                row = max(row, log["step"])
            if "eval/policy_version" in log:
                evaluation = max(evaluation, log["step"])
        return LastSteps(row, evaluation)


def _trace(row: Mapping[str, Any], answer: str) -> Any:
    messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer]}]
    metadata = {key: value for key, value in row.items() if key not in ("prompt", answer)}
    return trackio.Trace(messages=messages, metadata=metadata)
