"""A plan of a loaded configuration: with lengths and speeds of its own, or with those of an earlier run's files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollover.cluster.plan import placement_of
from rollover.cluster.report import roles_on, summary
from rollover.config import Config
from rollover.config.cluster import planned_devices
from rollover.config.load import Resolved
from rollover.config.schema import default_of
from rollover.run.run_files import RunFiles
from rollover.sim.plan import Plan, make_plan, speeds_of_run
from rollover.sim.played import Played
from rollover.sim.timeline import timeline
from rollover.system import cores
from rollover.track.recorded import read_rollouts

_OBSERVED_GROUPS = 20_000


def planned(
    resolved: Resolved, from_run: Path | None, say: Callable[[str], None] = lambda text: None
) -> tuple[Plan, dict[str, str], Callable[[], str]]:
    """(the plan, who set each value of [plan] that is not its default, what draws its first steps as SVG).

    ValueError where the files of `from_run` cannot be planned with, or [cluster] has no room for the processes. `say`
    is told what is being done.
    """
    config = resolved.config
    sources = {k.removeprefix("plan."): v for k, v in resolved.origin.items() if k.startswith("plan.")}
    observed = None
    if from_run is not None:
        observed, measured = _read_run(from_run, say)
        config = config.model_copy(update={"plan": config.plan.model_copy(update=measured)})
        sources |= {key: "run" for key in (*measured, "lengths")}
    elif config.plan.turns == 1 and (named := _names_turns(config)):
        say(f"{named} makes episodes of several turns, which are planned as one turn each: set plan.turns")
    nodes = _nodes(config)  # what has no room says so at once
    plan = make_plan(config, observed, progress=say)
    return replace(plan, **nodes), sources, lambda: timeline(config, observed)


def _nodes(config: Config) -> dict[str, Any]:
    """`nodes` and `placed` of a `Plan`. DoesNotFit (a ValueError) where [cluster] has no room."""
    own = {key: number for key, (number, _) in planned_devices(config).items()}
    plan = config.plan
    asked = {"plan.engines": plan.engines, "plan.trainers": plan.trainers}
    if config.cluster.type == "none" or any(own.get(key, default_of(key)) != asked[key] for key in asked):
        return {}
    placement = placement_of(config, cores())
    nodes = {node.name: roles_on(config, placement, node.name) for node in placement.nodes}
    return {"nodes": nodes, "placed": summary(placement)}


def _read_run(directory: Path, say: Callable[[str], None]) -> tuple[list[list[int]], dict[str, Any]]:
    """The lengths of its groups, and what its metrics say about speeds."""
    try:
        files = RunFiles(directory)
    except ValueError as error:
        raise ValueError(f"--from-run: {error}") from error
    observed: list[list[int]] = []
    prompts: list[int] = []
    played = Played()
    for groups in read_rollouts(files.recorded, include_dropped=True):
        observed += [played.lengths(group) for group in groups]
        prompts += [len(g.prompt) for g in groups]
        if len(observed) >= _OBSERVED_GROUPS:
            break
    if not observed:
        raise ValueError(f"--from-run {directory}: no group was recorded (track.rollouts was off, or no step was made)")
    prompt_tokens = sum(prompts) / len(prompts)
    values: dict[str, Any] = {"prompt_tokens": max(1, round(prompt_tokens)), **played.turns(files.events)}
    if files.value("rollout.overlap"):  # its seconds of generation are only those that the trainer waited
        say(f"{directory} generated while it trained: its metrics tell no speeds, only its lengths are taken")
        return observed, values
    speeds = speeds_of_run(files.metrics(), prompt_tokens)
    speeds["train_tokens_per_s"] *= files.value("train.epochs_per_step") or 1  # a rate of one of its epochs
    return observed, values | speeds


def _names_turns(config: Config) -> str:
    """What may have episodes of several turns; "": nothing."""
    workflow = config.workflow
    return workflow.agent or ("workflow.environment" if workflow.environment else "")
