"""The ledger of a run for the page: what was generated and where it went, in tokens and in seconds of slots; and
whether what was trained is as long as what was asked. Pure but for what its run reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollover.reading.run_files import RunFiles
from rollover.reading.trace_index import TraceIndex
from rollover.view.numbers import number

_BINS = 40
_HELD = "held"


def ledger(files: RunFiles) -> dict[str, Any]:
    """ "accounts": as `rollover show --json` has them, None before the first step. "slot_seconds": by what became of
    the group, None without a trace. "lengths": of the recorded rollouts, by outcome. "bias": what training takes of
    lengths, as metrics.jsonl says."""
    accounts, rows = files.accounts(), files.metrics()
    files.trace.look()
    bias = {key: number(value) for key, value in (rows[-1] if rows else {}).items() if key.startswith("bias/")}
    return {
        "accounts": None if accounts is None else accounts.as_json(),
        "missing_tokens": None if accounts is None else accounts.missing.tokens,
        "slot_seconds": slot_seconds(files.trace),
        "lengths": lengths(files),
        "bias": bias,
    }


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


def lengths(files: RunFiles) -> dict[str, Any]:
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
