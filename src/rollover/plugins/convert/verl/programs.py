"""verl's training programs: the module that a launch script starts determines synchronous or asynchronous training.

Names are those of verl 0.9.1 (verl/trainer, verl/experimental) and of verl-recipe, as modules or as files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from rollover.plugins.convert.mapping import Options, Unknown

PROGRAM = "program"
"""The option name for the module of a training command."""

SYNC, PARTIAL, ASYNC, ONE_STEP = "sync", "partial_rollout", "fully_async_policy", "one_step_off_policy"
_ACTOR = "actor_rollout_ref.actor"
# The last parts of a module -> its mode. dapo and entropy: PPO's trainer with filtered groups. transfer_queue, dynamo,
# specRL and split_placement compute the same in another place.
_MODES = {
    r"(?:verl\.trainer\.)?main_ppo": SYNC,
    r"dapo\.(?:dapo_transfer_queue\.)?main_dapo|main_dapo": SYNC,
    r"entropy\.main_entropy": SYNC,
    r"transfer_queue\.main_ppo|dynamo\.main_dynamo|specRL\.histoSpec\.main_ppo": SYNC,
    r"split_placement\.main_ppo_split": SYNC,
    r"partial_rollout\.main_ppo": PARTIAL,
    r"(?:fully_async_policy\.)?fully_async_main|reward_queue\.main": ASYNC,
    r"one_step_off_policy\.main_ppo": ONE_STEP,
}
# Why trainers of other recipes cannot be converted: differences that are not options.
_OTHERS = {
    "prime": "it learns a process reward model beside the policy",
    "spin": "its loss is DPO's, on pairs of its own answers",
    "sppo": "its loss is SPPO's, on preferences",
    "spo": "its baseline is a value tracked for each prompt",
    "gvpo": "its loss is GVPO's",
    "gkd": "it distills a teacher: docs/distillation.md",
    "flowrl": "its loss is FlowRL's",
    "dance_grpo": "it trains models of images and videos",
    "vla": "it trains models of vision and action",
    "rep_exp": "it rewards answers for being unlike the others",
    "atropos": "Atropos' environments generate and score: docs/agents.md",
    "async_flow": "it generates while it trains: take the recipe `fully_async` as a second file (docs/async.md)",
}


def mode(program: str) -> str:
    """Return the mode of a training program; empty if unknown."""
    parts = program.removesuffix(".py").replace("/", ".").strip(".").split(".")
    tail = next((".".join(parts[i + 1 :]) for i, part in enumerate(parts) if part in ("recipe", "experimental")), None)
    if tail is None and "verl" in parts[:-1]:
        tail = ".".join(parts[parts.index("verl") :])
    name = tail or ".".join(parts)
    return next((found for pattern, found in _MODES.items() if re.fullmatch(pattern, name)), "")


def with_program(options: dict[str, Any], program: str = "") -> dict[str, Any]:
    """Add the training program to the options, unless it is PPO's.

    An unknown program becomes a question under its own name. An empty `program` means the asynchronous trainer if there
    are options `async_training.*`, else PPO's.
    """
    asynchronous = any(name.startswith("async_training.") for name in options)
    program = program or ("fully_async_main" if asynchronous else "main_ppo")
    if not mode(program):
        known = next((reason for name, reason in _OTHERS.items() if name in re.split(r"[./]", program)), None)
        reason = known or "its trainer is not known here: what it does that no option says is lost"
        if is_rllm(options):
            reason = (
                "it is rLLM's, which is given its agent flow and its evaluator in Python: set --workflow.function (or"
                " workflow.environment) for an agent, and --rewards.function (docs/agents.md)"
            )
        return {program: Unknown(f"{reason}. Without it, PPO's trainer is converted")} | options
    return {PROGRAM: program} | options if asynchronous or mode(program) != SYNC else options


def is_rllm(options: Iterable[str]) -> bool:
    """Return whether options contain rLLM's tables."""
    return any(name.startswith(("rllm.", "rllm/")) for name in options)


def mode_of(options: Options) -> str:
    """Return the mode of the options' program."""
    return mode(str(options(PROGRAM))) or SYNC


def program(value: Any, options: Options) -> dict[str, Any]:
    """Return the settings of a program's mode."""
    found = mode(str(value))
    if found == PARTIAL:
        return {
            "rollout.interrupt": "when_enough",
            "rollout.supplement": True,
            "rollout.in_flight_groups": 2 * groups(options),
            "rollout.order": "oldest_first",
            "rollout.max_staleness": 2,
            "rollout.on_stale": "finish_first",
        }
    if found == ONE_STEP:
        return {
            "rollout.overlap": True,
            "rollout.interrupt": "never",
            "rollout.in_flight_groups": 2 * groups(options),
            "rollout.max_staleness": 1,
            "engine.kind": "process",
        }
    if found == ASYNC:
        return {"rollout.overlap": True, "rollout.on_stale": "finish_first", "engine.kind": "process"}
    return {}


def groups(options: Options) -> int:
    """Return the groups of a step. The asynchronous trainer takes `require_batches` minibatches."""
    if mode_of(options) == ASYNC:
        return options("async_training.require_batches") * options(f"{_ACTOR}.ppo_mini_batch_size")
    return options("data.train_batch_size")


def is_async(options: Options) -> bool:
    """Return whether the program is the asynchronous trainer."""
    return mode_of(options) == ASYNC


def ahead(value: Any, options: Options) -> dict[str, Any]:
    """Return how far generation runs ahead of training.

    Between two weight updates verl generates (1 + staleness_threshold) times the groups that it trains
    (`set_max_required_samples`); it trains the surplus after the next update.
    """
    share, steps = options("async_training.staleness_threshold"), options("async_training.trigger_parameter_sync_step")
    return {
        "train.publish_every": steps,
        "rollout.in_flight_groups": math.ceil((1 + share) * steps * groups(options)),
        "rollout.max_staleness": max(1, steps * (1 + math.ceil(share)) - 1),
    }


def interrupt(value: Any, options: Options) -> dict[str, Any]:
    return {"rollout.interrupt": "on_weight_update" if value else "never"}


def bypass(options: Options) -> bool:
    """Return whether the ratio's denominator is the sampling policy instead of `old_log_prob`."""
    found = mode_of(options)
    name = "algorithm.rollout_correction.bypass_mode"
    if found == ASYNC and name not in options.given:
        sampled, computed = (options(f"async_training.{name}") for name in ("use_rollout_log_probs",
                                                                           "compute_prox_log_prob"))  # fmt: skip
        return bool(sampled) and not computed
    return bool(options(name)) if name in options.given else found == ONE_STEP


def async_steps(value: Any, options: Options) -> dict[str, Any]:
    """Convert a number of prompts: verl's rollout step is one prompt."""
    return {"train.num_steps": max(1, int(value) // groups(options))} if value not in (None, "null") else {}


def async_evaluations(value: Any, options: Options) -> dict[str, Any]:
    """Convert an interval in weight updates."""
    return {"eval.every_steps": max(int(value), 0) * options("async_training.trigger_parameter_sync_step")}
