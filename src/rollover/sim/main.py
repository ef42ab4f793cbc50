"""The verb `rollover plan`: arguments and an earlier run's files in, text, JSON or a picture out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollover.config import Config
from rollover.config.load import Resolved
from rollover.files import check_output_file, did_you_mean_path
from rollover.sim.plan import Plan, make_plan, speeds_of_run
from rollover.sim.report import as_text
from rollover.sim.timeline import timeline
from rollover.track.recorder import read_rollouts
from rollover.track.sinks import atomic_write_text

_OBSERVED_GROUPS = 20_000


def run_plan(resolved: Resolved, args: argparse.Namespace) -> int:
    """Exit code. ValueError where the arguments or the run's files cannot be planned with."""
    config = _with_arguments(resolved.config, args)
    if args.svg is not None:
        check_output_file(args.svg, "--svg")
    plan, sources, draw = planned(replace(resolved, config=config), args.from_run, _to_stderr)
    if args.svg is not None:
        atomic_write_text(args.svg, draw())
    if args.json:
        print(json.dumps({**plan.as_json(), "sources": sources}, indent=2))
    else:
        print(as_text(plan, sources), end="")
    return 0


def planned(
    resolved: Resolved, from_run: Path | None, say: Callable[[str], None] = lambda text: None
) -> tuple[Plan, dict[str, str], Callable[[], str]]:
    """(the plan, who set each value of [plan] that is not its default, what draws its first steps as SVG).

    ValueError where the files of `from_run` cannot be planned with. `say` is told what is being done.
    """
    config = resolved.config
    sources = {k.removeprefix("plan."): v for k, v in resolved.origin.items() if k.startswith("plan.")}
    observed = None
    if from_run is not None:
        observed, measured = _read_run(from_run, say)
        config = config.model_copy(update={"plan": config.plan.model_copy(update=measured)})
        sources |= {key: "run" for key in (*measured, "lengths")}
    return make_plan(config, observed, progress=say), sources, lambda: timeline(config, observed)


def _to_stderr(text: str) -> None:
    print(f"rollover: plan: {text}", file=sys.stderr)


def _with_arguments(config: Config, args: argparse.Namespace) -> Config:
    """The configuration with the verb's own options; a step of another size keeps its proportions."""
    given: dict[str, Any] = {}
    if args.devices is not None:
        trainers = args.trainers or 0
        if args.engines is not None or trainers >= args.devices:
            raise ValueError(
                f"--devices {args.devices} are engines and trainers together: give --trainers (fewer) with it, or"
                " --engines and --trainers instead"
            )
        given["engines"] = args.devices - trainers
    names = ("engines", "trainers", "steps")
    given |= {name: value for name in names if (value := getattr(args, name)) is not None}
    if given.get("steps", 2) < 2:
        raise ValueError("--steps 1: a plan needs at least 2 steps")
    plan = config.plan.model_copy(update=given)
    rollout = config.rollout
    if args.rollouts_per_engine is not None:
        groups = max(1, round(plan.engines * args.rollouts_per_engine / rollout.rollouts_per_group))
        in_flight = rollout.in_flight_groups
        if in_flight != "auto":
            in_flight = round(in_flight / rollout.groups_per_step * groups)
        rollout = rollout.model_copy(update={"groups_per_step": groups, "in_flight_groups": in_flight})
    return config.model_copy(update={"plan": plan, "rollout": rollout})


def _read_run(directory: Path, say: Callable[[str], None]) -> tuple[list[list[int]], dict[str, Any]]:
    """(Lengths of its groups, what its metrics say about speeds)."""
    metrics = directory / "metrics.jsonl"
    if not metrics.is_file():
        if not directory.is_dir():
            raise ValueError(f"--from-run {directory}: there is no such folder{did_you_mean_path(directory)}")
        raise ValueError(f"--from-run {directory}: there is no metrics.jsonl. Give the directory of a run")
    observed: list[list[int]] = []
    prompts: list[int] = []
    for groups in read_rollouts(directory / "rollouts", include_dropped=True):
        observed += [[max(1, r.num_tokens) for r in g.rollouts] for g in groups]
        prompts += [len(g.prompt_ids) for g in groups]
        if len(observed) >= _OBSERVED_GROUPS:
            break
    if not observed:
        raise ValueError(f"--from-run {directory}: no group was recorded (track.rollouts was off, or no step was made)")
    prompt_tokens = sum(prompts) / len(prompts)
    values: dict[str, Any] = {"prompt_tokens": max(1, round(prompt_tokens))}
    if _overlapped(directory):
        say(f"{directory} generated while it trained: its metrics tell no speeds, only its lengths are taken")
        return observed, values
    rows = [json.loads(line) for line in metrics.read_bytes().splitlines()]
    return observed, values | speeds_of_run(rows, prompt_tokens)


def _overlapped(directory: Path) -> bool:
    """Whether the seconds of generation in that run's metrics are only those that the trainer waited."""
    config = directory / "config.resolved.json"
    return config.is_file() and json.loads(config.read_bytes())["rollout"]["overlap"]
