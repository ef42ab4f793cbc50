"""`rollover plan`: predict speed and staleness of a configuration, as text, JSON or a picture."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.commands import Overrides, Verb, load, positive
from rollover.logs import terminal

if TYPE_CHECKING:
    from rollover.config import Config


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--from-run", metavar="DIR", type=Path, help="take lengths and speeds from this run's directory")
    add("--devices", metavar="N", type=positive, help="engines and trainers together")
    add("--engines", metavar="N", type=positive, help="in place of plan.engines")
    add("--trainers", metavar="N", type=positive, help="in place of plan.trainers")
    add("--steps", metavar="N", type=positive, help="in place of plan.steps")
    add("--rollouts-per-engine", metavar="N", type=positive, help="rollouts that a step trains, for each engine")
    add("--svg", metavar="OUT.svg", type=Path, help="draw the first steps, synchronous training above")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    resolved = load(args.files, overrides, require_sources=False)
    from rollover.config.load import COMMAND_LINE
    from rollover.files import atomic_write_text, check_output_file
    from rollover.sim.plan import plan_config
    from rollover.sim.report import as_text, timeline

    config, given = with_arguments(resolved.config, args)
    origin = resolved.origin | {f"plan.{name}": COMMAND_LINE for name in given}
    if args.svg is not None:
        check_output_file(args.svg, "--svg")

    def warn(text: str) -> None:
        terminal.warning(f"plan: {text}")

    plan, sources, config, observed = plan_config(replace(resolved, config=config, origin=origin), args.from_run, warn)
    if args.svg is not None:
        atomic_write_text(args.svg, timeline(config, observed))
    if args.json:
        print(json.dumps({**plan.as_json(), "sources": sources}, indent=2))
    else:
        print(as_text(plan, sources), end="")
    return 0


def with_arguments(config: Config, args: argparse.Namespace) -> tuple[Config, list[str]]:
    """Return the configuration with the verb's own options, and the keys of [plan] that they set.

    A step of another size keeps the ratio of groups in flight.
    """
    given: dict[str, Any] = {}
    if args.devices is not None:
        trainers = config.plan.trainers if args.trainers is None else args.trainers
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
    return config.model_copy(update={"plan": plan, "rollout": rollout}), list(given)


VERB = Verb("Predict speed, idleness, staleness and waste of a configuration, without running it.", run, arguments)
