"""MLflow: one run of an experiment, identified by the tag rollover.id. MLflow's own variables choose the store.

A logged value can be neither changed nor removed there. So after a rollback, or if a kill left a part of a row, a new
MLflow run gets all earlier steps, and the old one is deleted (MLflow can restore it).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

from rollover.plugins.trackers.adapter import About, Adapter, LastSteps, as_paths, flatten
from rollover.track.tracker import Cut

_ID = "rollover.id"
_MOST_METRICS, _MOST_PARAMS, _MOST_CHARS, _MOST_NAME = 1000, 100, 500, 250  # per request; per value, name


class MLflow(Adapter):
    """`place`: the store and the run's id there."""

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self._client: MlflowClient | None = None
        self._run = ""

    def truncate(self, cut: Cut) -> None:
        self._client = client = MlflowClient()
        name = self.about.project_or("MLFLOW_EXPERIMENT_NAME")
        experiment = client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else client.create_experiment(name)
        self._run = ""
        for run in client.search_runs([number], f"tags.`{_ID}` = '{self.about.id}'"):
            last = {kind: int(run.data.metrics.get(f"{kind}policy_version", -1)) for kind in ("", "eval/")}
            if max(last.values()) > cut.step or any(_is_torn(client, run, *of) for of in last.items()):
                client.delete_run(run.info.run_id)
            else:
                self._run, self.last_steps = run.info.run_id, LastSteps(last[""], last["eval/"])
                client.update_run(self._run, status="RUNNING")
        if not self._run:
            self._run, self.last_steps = self._begin(client, number), LastSteps()
        client.log_dict(self._run, dict(self.about.config), "config.json")
        self.place = f"{client.tracking_uri}, run {self._run}"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        assert self._client is not None
        now = int(time.time() * 1000)
        metrics = [Metric(key, value, now, step) for key, value in as_paths(numbers, _MOST_NAME).items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MOST_METRICS])

    def show(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._client is not None
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}  # MLflow's own format
        self._client.log_dict(self._run, table, f"{name}/step-{step:06d}.json")

    def on_artifact(self, name: str, files: Mapping[str, Path]) -> None:
        assert self._client is not None
        for path, file in files.items():
            self._client.log_artifact(self._run, str(file), (PurePosixPath(name) / path).parent.as_posix())

    def close(self) -> None:
        if self._client is not None and self._run:
            self._client.set_terminated(self._run, "FAILED" if self.failed else "FINISHED")

    def _begin(self, client: MlflowClient, experiment: str) -> str:
        about = self.about
        group = {"group": about.group} if about.group else {}
        tags = {_ID: about.id} | group | as_paths(dict.fromkeys(about.tags, "true"), _MOST_NAME)
        run = client.create_run(experiment, run_name=about.name, tags=tags).info.run_id
        values = {key: str(value)[:_MOST_CHARS] for key, value in flatten(about.config).items() if value != ""}
        params = [Param(key.replace("/", "."), value) for key, value in as_paths(values, _MOST_NAME).items()]
        for start in range(0, len(params), _MOST_PARAMS):
            client.log_batch(run, params=params[start : start + _MOST_PARAMS])
        return run


def _is_torn(client: MlflowClient, run: Any, kind: str, last: int) -> bool:
    """Return whether a file store has a part of a row of this kind ("" or "eval/") after the `last` complete one."""
    of_files = client.tracking_uri.startswith("file:") or "://" not in client.tracking_uri
    keys = [key for key in run.data.metrics if of_files and key.startswith("eval/") == bool(kind)]
    return any(max(of.step for of in client.get_metric_history(run.info.run_id, key)) > last for key in keys)
