"""The ledger of a run for the page: what was generated and where it went, in tokens and in seconds of slots; and
whether what was trained is as long as what was asked. Pure but for what its run reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollover.plugins.dashboard.accounts import accounts_of
from rollover.plugins.dashboard.columns import Columns
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.numbers import number
from rollover.plugins.dashboard.trace_index import TraceIndex
from rollover.track.metrics import find

_BINS = 40
_HELD = "held"


def ledger(files: IndexedRun) -> dict[str, Any]:
    """ "accounts": as `rollover show --json` has them, None before the first step. "waste": what was computed in vain
    or twice, in tokens and (as metrics.jsonl estimates it) seconds. "slot_seconds": by what became of the group, None
    without a trace. "lengths": of the recorded rollouts, by outcome. "bias": what training takes of lengths, as
    metrics.jsonl says of the run so far, and of what it says of single steps the mean of these. "read": the share of
    the run's files that all this is of."""
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
    """ "dropped": sampled and never trained; "reprefilled": computed again as a rollout went on. Of all steps together,
    "tokens" and "seconds"; a key that no step has is left out. What was dropped at a step that generated nothing took
    as long as a token of the run."""
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
    """The mean time of a generated token; nan where nothing was generated."""
    tokens = np.nansum(columns.column("tokens/step_generated"))
    return float(np.nansum(columns.column("time/generate_s")) / tokens) if tokens else float("nan")


def bias(columns: Columns) -> dict[str, float | int | None]:
    """Of each key bias/ its value; None where no step has one."""
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
    """Seconds that rollouts were in slots of engines, by what became of their groups: "trained", "held", or
    "dropped:" and the reason. None where no trace was written."""
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
    """A histogram of the lengths of answers, of the same bins for each outcome: "edges" are one more than counts."""
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
