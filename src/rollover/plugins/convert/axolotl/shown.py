"""Tools that Axolotl shows a run in, as values of ours: functions that rows.py names. There a project that is named
for a tool switches it on."""

from __future__ import annotations

from typing import Any

from rollover.plugins.convert import shown
from rollover.plugins.convert.mapping import Options, Unanswered

_PROJECTS = {"wandb": "wandb_project", "mlflow": "mlflow_experiment_name", "trackio": "trackio_project_name"}
_NAMES = {"wandb": ("wandb_name", "wandb_run_id"), "mlflow": ("mlflow_run_name",), "trackio": ("trackio_run_name",)}


def tools(options: Options) -> list[str]:
    """The tools that are switched on."""
    named = [name for name in ("wandb", "tensorboard", "trackio", "mlflow") if _is_on(name, options)]
    return [name for name in named if name != "wandb" or options("wandb_mode") != "disabled"]


def _is_on(name: str, options: Options) -> bool:
    return bool(options(f"use_{name}") or (name in _PROJECTS and options(_PROJECTS[name])))


def trackers(value: Any, options: Options) -> dict[str, Any]:
    return shown.trackers(tools(options))


def project(value: Any, options: Options) -> dict[str, Any]:
    """Of the first tool that names one."""
    named = [options(_PROJECTS[tool]) for tool in tools(options) if tool in _PROJECTS]
    named = [name for name in named if name]
    values = {**trackers(value, options), **({"track.project": named[0]} if named else {})}
    if value and value not in named[:1]:
        raise Unanswered(f"all tools have one project, {named[0]}" if named else "its tool is switched off", values)
    return values


def name(value: Any, options: Options) -> dict[str, Any]:
    """Of the first tool that names one."""
    options_of = [option for tool in tools(options) for option in _NAMES.get(tool, ())]
    named = [options(option) for option in options_of if options(option)]
    return {"run.name": named[0]} if named else {}


def entity(value: Any, options: Options) -> dict[str, Any]:
    return shown.where(tools, "track.entity", of=("wandb",))(value, options)


def completions(value: Any, options: Options) -> dict[str, Any]:
    """Texts go to a tool where they went there before."""
    return {} if value else shown.where(tools, "track.tracker_rollouts")(0, options)


def artifacts(value: Any, options: Options) -> dict[str, Any]:
    """The model, which a tool is given once, at the end."""
    on = options("wandb_log_model") in ("end", "checkpoint") and "wandb" in tools(options)
    on |= bool(options("hf_mlflow_log_artifacts")) and "mlflow" in tools(options)
    return {"track.artifacts": ["model"]} if on else {}
