"""Statistics of a run for the page: ledger, waste, lengths, reward intervals, staleness.

Siblings answer one task and are not independent: reward intervals use one mean per group, as evaluations do. Each
trajectory counts once, however many contexts it has, as in reward/mean.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from rollover.plugins.dashboard.columns import Columns
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.metrics import accounts_of
from rollover.plugins.dashboard.numbers import number, numbers
from rollover.plugins.dashboard.rollout_index import NO_VERSION, RolloutIndex, staleness
from rollover.plugins.dashboard.trace_index import TraceIndex
from rollover.track.metrics import find
from rollover.track.records import TRAINED
from rollover.track.statistics import Z_95

_BINS = 40
_HELD = "held"


def ledger(files: IndexedRun) -> dict[str, Any]:
    """Return the ledger of a run.

    "accounts": as in `rollover show --json`, None before the first step. "waste": tokens and (estimated) seconds of
    dropped and repeated work. "slot_seconds": by outcome of the group, None without a trace. "lengths": of the recorded
    rollouts, by outcome. "bias": the bias/ metrics, of single steps their mean. "read": share of the run's files that
    are read.
    """
    columns = files.columns()
    accounts = accounts_of(columns.last)
    files.trace.look()
    return {
        "accounts": None if accounts is None else accounts.as_json(),
        "missing_tokens": None if accounts is None else accounts.missing.tokens,
        "waste": waste(columns),
        "slot_seconds": slot_seconds(files.trace),
        "lengths": lengths(files),
        "bias": bias(columns),
        "read": min(files.shares.values()),
    }


def waste(columns: Columns) -> dict[str, dict[str, float | int | None]]:
    """Return "tokens" and "seconds" of all steps, for "dropped" (sampled, never trained) and "reprefilled" work.

    Missing keys are omitted. Drops in a step without generation count with the run's mean time per token.
    """
    found: dict[str, dict[str, float | int | None]] = {}
    for of in ("dropped", "reprefilled"):
        keys = {"tokens": f"waste/{of}_tokens", "seconds": f"waste/{of}_s"}
        sums = {unit: columns.column(key) for unit, key in keys.items() if key in columns.latest}
        if of == "dropped" and len(sums) == 2:
            unknown = np.isnan(sums["seconds"])
            sums["seconds"] = np.where(unknown, sums["tokens"] * _token_s(columns), sums["seconds"])
        if sums:
            found[of] = {unit: number(float(np.nansum(values))) for unit, values in sums.items()}
    return found


def _token_s(columns: Columns) -> float:
    """Mean time of a generated token, nan without tokens."""
    tokens = np.nansum(columns.column("tokens/step_generated"))
    return float(np.nansum(columns.column("time/generate_s")) / tokens) if tokens else float("nan")


def bias(columns: Columns) -> dict[str, float | int | None]:
    """Return the value of each bias/ key, None if missing."""
    found = {}
    for key in (key for key in columns.last if key.startswith("bias/")):
        if (metric := find(key)) is not None and metric.kind == "mean":
            values = columns.column(key)
            there = values[~np.isnan(values)]
            found[key] = number(float(there.mean())) if len(there) else None
        else:
            found[key] = number(columns.last[key])
    return found


def slot_seconds(index: TraceIndex) -> dict[str, float] | None:
    """Return seconds in engine slots by outcome of the group: "trained", "held" or "dropped:REASON"; None without a
    trace."""
    bars, drops = index.bars(), index.drops()
    if not len(bars):
        return None
    seconds = bars["end"] - bars["start"]
    trained = np.isin(bars["group"], np.fromiter(index.consumed, np.int64))
    found = {"trained": float(seconds[trained].sum())}
    left = ~trained
    for number_of, reason in enumerate(index.reasons):
        dropped = left & np.isin(bars["group"], drops["group"][drops["reason"] == number_of])
        found[f"dropped:{reason}"] = float(seconds[dropped].sum())
        left &= ~dropped
    found[_HELD] = float(seconds[left].sum())
    return {name: round(value, 3) for name, value in found.items() if value}


def lengths(files: IndexedRun) -> dict[str, Any]:
    """Return a histogram of lengths with equal bins for each outcome."""
    entries = files.rollouts.entries()
    tokens = entries["num_tokens"]
    edges = np.unique(np.linspace(0, int(tokens.max(initial=1)) + 1, _BINS + 1).astype(np.int64))
    found: dict[str, list[int]] = {}
    means: dict[str, float | int | None] = {}
    for number_of in np.unique(entries["outcome"]):
        of = tokens[entries["outcome"] == number_of]
        outcome = files.rollouts.word(int(number_of))
        found[outcome] = np.histogram(of, edges)[0].tolist()
        means[outcome] = number(float(of.mean()))
    return {"edges": edges.tolist(), "counts": found, "means": means}


MOST_STEPS = 2000
MOST_COLUMNS, MOST_LEVELS = 200, 12


def reward_intervals(index: RolloutIndex, untrained: Collection[str] = ()) -> dict[str, Any]:
    """Return the 95 % interval of the mean reward per step: "steps", "low", "high".

    Mean over the n trained groups' mean scores, +- z * s / sqrt(n) (normal, s with n - 1). Steps with one group have
    none; above MOST_STEPS, evenly spaced steps. `untrained`: roles to exclude.
    """
    entries = _trained(index)
    entries = entries[~np.isnan(entries["score"]) & (entries["context"] == 0)]
    left_out = [number for number, word in enumerate(index.words) if word in untrained]
    entries = entries[~np.isin(entries["role"], left_out)]
    pairs, of_entry = np.unique(entries[["step", "group_id"]], return_inverse=True)
    sums = np.bincount(of_entry, weights=entries["score"], minlength=len(pairs))
    means = sums / np.bincount(of_entry, minlength=len(pairs))
    steps, of_pair = np.unique(pairs["step"], return_inverse=True)
    count = np.bincount(of_pair, minlength=len(steps))
    mean = np.bincount(of_pair, weights=means, minlength=len(steps)) / np.maximum(count, 1)
    squares = np.bincount(of_pair, weights=(means - mean[of_pair]) ** 2, minlength=len(steps))
    several = count > 1
    half = Z_95 * np.sqrt(squares[several] / (count[several] - 1) / count[several])
    every = max(1, -(-len(half) // MOST_STEPS))
    steps, mean, half = steps[several][::every], mean[several][::every], half[::every]
    return {"steps": steps.tolist(), "low": numbers(mean - half), "high": numbers(mean + half)}


def staleness_map(index: RolloutIndex) -> dict[str, Any]:
    """Count trained rollouts by step and staleness (of the oldest token): "counts" [level][column].

    A column is the steps from "first" to "last", a level the stalenesses from "low" to "high".
    """
    entries = _trained(index)
    entries = entries[entries["oldest"] != NO_VERSION]
    steps, ages = entries["step"].astype(np.int64), staleness(entries).astype(np.int64)
    if not len(steps):
        return {"first": [], "last": [], "low": [], "high": [], "counts": [], "read": index.share}
    begin, end = int(steps.min()), int(steps.max())
    width = -(-(end - begin + 1) // MOST_COLUMNS)
    of_level = -(-(int(ages.max()) + 1) // MOST_LEVELS)
    first = np.arange(begin, end + 1, width)
    low = np.arange(0, int(ages.max()) + 1, of_level)
    counts = np.zeros((len(low), len(first)), np.int64)
    np.add.at(counts, (ages // of_level, (steps - begin) // width), 1)
    return {
        "first": first.tolist(),
        "last": np.minimum(first + width - 1, end).tolist(),
        "low": low.tolist(),
        "high": (low + of_level - 1).tolist(),
        "counts": counts.tolist(),
        "read": index.share,
    }


def _trained(index: RolloutIndex) -> np.ndarray:
    entries = index.entries()
    return entries[entries["outcome"] == (index.words.index(TRAINED) if TRAINED in index.words else -1)]
