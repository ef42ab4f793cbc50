"""Lengths and speeds of an earlier run, as values of [plan]."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rollover.run.run_files import RunFiles
from rollover.track.records import read_rollouts
from rollover.track.trace import TraceEvent, acts
from rollover.trajectories import turns_of
from rollover.types import Group

_OBSERVED_GROUPS = 20_000


def read_run(directory: Path, say: Callable[[str], None]) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the lengths of the run's groups, and values of [plan] from its records and metrics."""
    try:
        files = RunFiles(directory)
    except ValueError as error:
        raise ValueError(f"--from-run: {error}") from error
    observed: list[list[int]] = []
    prompts: list[int] = []
    episodes = EpisodeCounts()
    for groups in read_rollouts(files.recorded, include_dropped=True):
        observed += [episodes.lengths(group) for group in groups]
        prompts += [len(g.prompt) for g in groups]
        if len(observed) >= _OBSERVED_GROUPS:
            break
    if not observed:
        raise ValueError(f"--from-run {directory}: no group was recorded (track.rollouts was off, or no step was made)")
    prompt_tokens = sum(prompts) / len(prompts)
    values: dict[str, Any] = {"prompt_tokens": max(1, round(prompt_tokens)), **episodes.turns(files.events)}
    if files.value("rollout.overlap"):  # time/generate_s is only the trainer's waiting time
        say(f"{directory} generated during training: its metrics have no speeds, so only its lengths are used")
        return observed, values
    speeds = speeds_of_run(files.metrics(), prompt_tokens)
    speeds["train_tokens_per_s"] *= files.value("train.epochs_per_step") or 1  # [plan] has the rate of one epoch
    return observed, values | speeds


class EpisodeCounts:
    """Counts turns and tokens of episodes. Several rollouts of an episode count as one with all their turns."""

    def __init__(self) -> None:
        self._episodes = self._turns = self._environment_tokens = 0

    def lengths(self, group: Group) -> list[int]:
        """Count the group; returns the sampled tokens of each episode, at least 1."""
        lengths: dict[int, int] = {}
        for rollout in group.rollouts:
            lengths[rollout.sibling] = lengths.get(rollout.sibling, 0) + rollout.num_sampled_tokens
            self._turns += len(turns_of(rollout))
            self._environment_tokens += rollout.num_tokens - rollout.num_sampled_tokens
        self._episodes += len(lengths)
        return [max(1, length) for length in lengths.values()]

    def turns(self, events: Callable[[], Iterable[TraceEvent]]) -> dict[str, Any]:
        """Return values of [plan] from the episodes and the trace; {} if they have one turn each."""
        turns = round(self._turns / max(1, self._episodes))
        if turns < 2:
            return {}
        between = self._turns - self._episodes
        values: dict[str, Any] = {"turns": turns, "tool_tokens": max(1, round(self._environment_tokens / between))}
        worked = [act.seconds for act in acts(list(events())) if act.goes_on]
        return values | ({"tool_s": sum(worked) / len(worked)} if worked else {})


def speeds_of_run(rows: list[dict[str, Any]], prompt_tokens: float) -> dict[str, Any]:
    """Return PlanConfig values from the metrics of a run: decode steps by batch size, prefill, training, weight sync.

    The time of a decode step is a linear fit over the steps' mean batch sizes, without prefill and without waits for
    environments alone (plan.tool_s). Servers report neither decode steps nor prefill. ValueError with too few steps.
    """
    of_servers = bool(rows) and rows[-1].get("engine/servers") is not None
    decoding = {} if of_servers else _decode_steps(rows) | _prefill(rows[-1])
    tokens = rows[-1]["tokens/trained"]  # as in the simulation: with masked tokens, without replayed ones
    prompts = rows[-1]["groups/consumed"] * prompt_tokens  # of all steps
    train_s = sum(row["time/train_s"] for row in rows)
    return decoding | {
        "train_tokens_per_s": (tokens + prompts) / train_s,
        "weight_sync_s": statistics.mean([s for row in rows if (s := row["time/weights_s"])] or [0.0]),
    }


def _decode_steps(rows: list[dict[str, Any]]) -> dict[str, Any]:
    points: list[tuple[float, float]] = []
    clean: list[tuple[float, float]] = []  # without evaluations, whose decode steps the engine counts, too
    before: dict[str, Any] = {}
    for row in rows:
        steps = row["engine/decode_steps"] - before.get("engine/decode_steps", 0.0)
        prefill_s = (row.get("engine/prefill_s") or 0.0) - (before.get("engine/prefill_s") or 0.0)
        if steps > 0 and row["tokens/step_generated"] > 0:
            decoding = max(0.0, row["time/generate_s"] - prefill_s - (row.get("wait/environment_s") or 0.0))
            points.append((row["tokens/step_generated"] / steps, decoding / steps))
            if before and not row.get("time/eval_s"):  # an evaluation may precede the first step
                clean.append(points[-1])
        before = row
    points = clean if len(clean) > 1 else points
    if len(points) < 2:
        raise ValueError("--from-run: the run's metrics.jsonl has fewer than two steps that generated something")
    batches, seconds = zip(*points, strict=True)
    slope, base = 0.0, statistics.mean(seconds)
    if max(batches) > 1.2 * min(batches):
        slope, base = statistics.linear_regression(batches, seconds)
        if base <= 0 or slope < 0:  # noise: assume proportional to the batch, or constant
            slope, base = (sum(seconds) / sum(batches), 1e-4) if slope >= 0 else (0.0, statistics.mean(seconds))
    most = max(2, round(max(batches)))
    return {"decode_batches": [1, most], "decode_step_s": [base + slope, base + slope * most]}


def _prefill(last: dict[str, Any]) -> dict[str, Any]:
    tokens = sum(last.get(f"engine/{key}_tokens") or 0.0 for key in ("prefill", "reprefill"))
    seconds = last.get("engine/prefill_s") or 0.0
    return {"prefill_tokens_per_s": tokens / seconds, "prefill_min_s": 0.0} if tokens and seconds else {}
