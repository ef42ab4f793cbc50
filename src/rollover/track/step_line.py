"""A step in one line: what a person needs in 120 columns, or all that the view knows of it (track.live = "verbose").

Pure.
"""

from __future__ import annotations

from rollover.track.bottleneck import verdict
from rollover.track.figures import DASH, count, decimal, duration, percent, time_split
from rollover.track.tracker import Row

COLUMNS = 120
_BETWEEN = " | "


def step_line(row: Row, num_steps: int, trend: float | None, eta_s: float | None) -> str:
    """The most important first; what has no room is left out, from the end."""
    if "sft/loss" in row:
        return _of_examples(row, num_steps, eta_s)
    dropped, generated = row.get("tokens/dropped"), row.get("tokens/generated")
    parts = [
        f"step {count(row.get('step'))}/{num_steps}",
        f"reward {decimal(row.get('reward/mean'))} (trend {decimal(trend)})",
        f"{decimal(row.get('time/step_s'), 1)} s, ETA {duration(eta_s)}",
        f"{count(row.get('speed/generated_tokens_per_s'))} tok/s",
        f"staleness {staleness(row)}",
        f"partial {percent(row.get('rollouts/partial_share'))}",
        f"dropped {percent(dropped / generated if generated and dropped is not None else None)}",
    ]
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(_BETWEEN) + len(part) > COLUMNS:
            break
        line += _BETWEEN + part
    return line


def full_line(row: Row, num_steps: int, trend: float | None, eta_s: float | None) -> str:
    """Everything, however long."""
    if "sft/loss" in row:
        return _of_examples(row, num_steps, eta_s)
    split, of = " ".join(f"{label} {percent(share)}" for label, share in time_split(row)) or DASH, verdict(row)
    parts = [
        f"step {count(row.get('step'))}/{num_steps}",
        f"reward {decimal(row.get('reward/mean'))} (trend {decimal(trend)})",
        f"{count(row.get('speed/generated_tokens_per_s'))} tok/s",
        f"generated {count(row.get('tokens/generated'))} trained {count(row.get('tokens/trained'))}"
        f" dropped {count(row.get('tokens/dropped'))} held {count(row.get('tokens/held'))}",
        f"staleness {staleness(row)}",
        *([f"acting {count(acting)}"] if (acting := row.get("rollouts/acting")) is not None else []),
        f"resumed {count(row.get('rollouts/resumed'))} partial {percent(row.get('rollouts/partial_share'))}",
        split,
        of.text if of is not None else DASH,
        f"{decimal(row.get('time/step_s'), 1)} s",
        f"ETA {duration(eta_s)}",
    ]
    return _BETWEEN.join(parts)


def _of_examples(row: Row, num_steps: int, eta_s: float | None) -> str:
    """A step of supervised training."""
    held_out = row.get("eval/sft_loss")
    parts = [
        f"step {count(row.get('step'))}/{num_steps}",
        f"loss {decimal(row.get('sft/loss'))}",
        *([f"held-out loss {decimal(held_out)}"] if held_out is not None else []),
        f"pass {decimal(row.get('sft/epoch'), 2)}",
        f"{decimal(row.get('time/step_s'), 1)} s, ETA {duration(eta_s)}",
        f"{count(row.get('speed/trained_tokens_per_s'))} tok/s",
    ]
    return _BETWEEN.join(parts)


def staleness(row: Row) -> str:
    """The oldest token of the step, and what the bound is."""
    return f"{count(row.get('staleness/max'))}/{count(row.get('staleness/bound'))}"
