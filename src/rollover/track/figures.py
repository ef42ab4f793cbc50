"""Formatting of numbers (counts, shares, times), a sparkline, and the time split of a step. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollover.track.tracker import Row

_SPARKS = "▁▂▃▄▅▆▇█"
DASH = "-"
# (label, key, colour) of the time split; the rest of time/step_s is "other".
TIME_SPLIT = (
    ("generate", "time/generate_s", "cyan"),
    ("score", "time/score_s", "magenta"),
    ("train", "time/train_s", "green"),
    ("weights", "time/weights_s", "yellow"),
    ("sleep", "time/sleep_s", "yellow"),
    ("checkpoint", "time/checkpoint_s", "blue"),
    ("eval", "time/eval_s", "blue"),
)
_NOT_EVERY_STEP = ("sleep", "checkpoint", "eval")  # shown in the steps that have them


def count(value: float | None) -> str:
    """Format 1234567 as 1.23M, None as a dash."""
    if value is None or not math.isfinite(value):
        return DASH
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}" if abs(scaled) < 999.5 else f"{scaled:.0f}{unit}"
    return f"{value:,.0f}"


def decimal(value: float | None, digits: int = 3) -> str:
    return DASH if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    """Format as `0.512 [0.488, 0.536]`, without an interval as the value alone."""
    return decimal(value) + (f" [{decimal(interval[0])}, {decimal(interval[1])}]" if interval else "")


def percent(share: float | None) -> str:
    return DASH if share is None or not math.isfinite(share) else f"{100 * share:.0f}%"


def duration(seconds: float | None) -> str:
    """Format 75 as 1:15, 4000 as 1:06:40, None as a dash."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def sparkline(values: list[float], width: int) -> str:
    """Draw the last `width` values as bars between their smallest and largest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    return "".join(_SPARKS[int((v - low) / span * (len(_SPARKS) - 1) + 0.5)] if span > 0 else _SPARKS[0] for v in shown)


def time_split(row: Row) -> list[tuple[str, float]]:
    """Return shares of time/step_s by label, "other" last; [] without times.

    Sleep, checkpoint and evaluation are omitted in a step without them.
    """
    total = row.get("time/step_s")
    if not total:
        return []
    seconds = [(label, row.get(key) or 0.0) for label, key, _ in TIME_SPLIT]
    shares = [(label, s / total) for label, s in seconds if s or label not in _NOT_EVERY_STEP]
    return [*shares, ("other", max(0.0, 1 - sum(share for _, share in shares)))]
