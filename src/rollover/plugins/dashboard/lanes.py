"""A window of the trace: engine slots as lanes over time, and the phases of the loop. Pure.

A window with few bars has every bar. One with many has a grid with a cell per lane and screen column: the version with
the longest time in it, and the busy share of the slot. Details finer than the screen are not sent, but the shares
include them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollover.plugins.dashboard.numbers import columns_of, times
from rollover.plugins.dashboard.trace_index import BAR, TraceIndex
from rollover.track.trace import Span

MOST_BARS, MOST_COLUMNS = 4000, 4000
_MOST_CELLS, _FEWEST_COLUMNS = 60_000, 150  # before equal neighbours are merged
_ENGINE = 1 << 32  # a lane's number is engine * _ENGINE + slot
_BUSY_STEPS = 20  # levels of the busy share


def window(index: TraceIndex, start: float, end: float, columns: int, most_bars: int = MOST_BARS) -> dict[str, Any]:
    """Return the window from `start` to `end` seconds; ValueError for an invalid window or number of columns.

    "lanes": [engine, slot] of each. "bars" or "cells" is None. A bar's "how" is a sum of RESUMED and PARKED
    (trace_index.py), 4 if its group was dropped, and 8 if it still runs. Equal neighbouring cells are one cell of some
    `length`; with many lanes there are fewer columns than requested; "busy" is in twentieths. Spans of one name within
    one column are merged. "read": share of the trace that was read. "acts": environments and agents at work, in lanes
    of their own, as "bars" or "cells" (of version -1); None without any.
    """
    if not end > start:
        raise ValueError(f"from, to: {start:g} to {end:g} is no window of time")
    if not 1 <= columns <= MOST_COLUMNS:
        raise ValueError(f"columns: {columns} are not 1 to {MOST_COLUMNS}")
    running = index.open_bars()
    bars = np.concatenate([index.bars(), running])
    lane_of = bars["engine"].astype(np.int64) * _ENGINE + bars["slot"]
    lanes, lane = np.unique(lane_of, return_inverse=True)
    drops, published = index.drops(), index.published()
    still = np.zeros(len(bars), np.uint8)
    still[len(bars) - len(running) :] = 8
    seen = (bars["end"] >= start) & (bars["start"] <= end)
    bars, lane, still = bars[seen], lane[seen], still[seen]
    resolution = (end - start) / columns
    few = len(bars) <= most_bars
    of_cells = min(columns, max(_FEWEST_COLUMNS, _MOST_CELLS // max(1, len(lanes))))
    of_window = _between(drops, start, end)
    return {
        "from": start,
        "to": end,
        "seconds": round(index.seconds, 6),
        "lanes": [[int(number // _ENGINE), int(number % _ENGINE)] for number in lanes],
        "bars": _bars(index, bars, lane, still, drops, resolution) if few else None,
        "cells": None if few else _cells(bars, lane, start, end, of_cells),
        "spans": _spans([*index.spans(), *index.open_spans()], start, end, resolution),
        "published": _thinned(_between(published, start, end), ("version",), columns, resolution),
        "drops": _thinned(of_window, ("group", "reason", "tokens"), columns, resolution),
        "reasons": list(index.reasons),
        "read": index.share,
        "acts": _acts(index, start, end, of_cells, most_bars, resolution),
    }


def _bars(
    index: TraceIndex, bars: np.ndarray, lane: np.ndarray, still: np.ndarray, drops: np.ndarray, resolution: float
) -> dict[str, Any]:
    dropped = np.isin(bars["group"], drops["group"]).astype(np.uint8) * 4
    words, sibling = np.unique(bars["sibling"], return_inverse=True)
    return {
        "lane": lane.tolist(),
        "start": times(bars["start"], resolution),
        "end": times(bars["end"], resolution),
        "sibling": sibling.tolist(),
        "siblings": [index.siblings[number] for number in words],
        "how": (bars["how"] | dropped | still).tolist(),
        **columns_of(bars, ("group", "version", "tokens")),
    }


def _acts(
    index: TraceIndex, start: float, end: float, columns: int, most_bars: int, resolution: float
) -> dict[str, Any] | None:
    acts = index.acts()
    if not len(acts):
        return None
    lanes = int(acts["lane"].max()) + 1
    acts = acts[(acts["end"] >= start) & (acts["start"] <= end)]
    if len(acts) > most_bars:
        bars = np.zeros(len(acts), BAR)
        bars["start"], bars["end"], bars["version"] = acts["start"], acts["end"], -1
        return {"lanes": lanes, "bars": None, "cells": _cells(bars, acts["lane"], start, end, columns)}
    words, sibling = np.unique(acts["sibling"], return_inverse=True)
    shown = {
        "lane": acts["lane"].tolist(),
        "start": times(acts["start"], resolution),
        "end": times(acts["end"], resolution),
        "group": acts["group"].tolist(),
        "sibling": sibling.tolist(),
        "siblings": [index.siblings[number] for number in words],
    }
    return {"lanes": lanes, "bars": shown, "cells": None}


def _cells(bars: np.ndarray, lane: np.ndarray, start: float, end: float, columns: int) -> dict[str, Any]:
    width = (end - start) / columns
    begins, ends = np.maximum(bars["start"], start), np.minimum(bars["end"], end)
    first = np.clip(((begins - start) / width).astype(np.int64), 0, columns - 1)
    last = np.clip(np.ceil((ends - start) / width).astype(np.int64) - 1, first, columns - 1)
    counts = last - first + 1
    of = np.repeat(np.arange(len(bars)), counts)
    column = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    left = start + column * width
    seconds = np.maximum(0.0, np.minimum(ends[of], left + width) - np.maximum(begins[of], left))
    versions, version = np.unique(bars["version"], return_inverse=True)
    # Seconds of each version in each cell, then the version with most seconds of each cell.
    part, place = np.unique((lane[of] * columns + column) * len(versions) + version[of], return_inverse=True)
    of_part = np.bincount(place, weights=seconds, minlength=len(part))
    cell_of_part = part // len(versions)
    order = np.lexsort((of_part, cell_of_part))
    longest = order[np.append(np.diff(cell_of_part[order]) != 0, True)]
    cell = cell_of_part[longest]
    busy_s = np.bincount(np.searchsorted(cell, cell_of_part), weights=of_part, minlength=len(cell))
    busy = np.clip(np.round(busy_s / width * _BUSY_STEPS), 1, _BUSY_STEPS).astype(np.int64)
    shown = versions[part[longest] % len(versions)]
    # Runs of equal cells in one lane.
    alike = (np.diff(cell) == 1) & (cell[1:] % columns != 0) & (np.diff(shown) == 0) & (np.diff(busy) == 0)
    begin = np.flatnonzero(np.append(True, ~alike))
    return {
        "columns": columns,
        "lane": (cell[begin] // columns).tolist(),
        "column": (cell[begin] % columns).tolist(),
        "length": np.diff(np.append(begin, len(cell))).tolist(),
        "version": shown[begin].tolist(),
        "busy": busy[begin].tolist(),
    }


def _between(points: np.ndarray, start: float, end: float) -> np.ndarray:
    return points[(points["seconds"] >= start) & (points["seconds"] <= end)]


def _thinned(points: np.ndarray, names: Sequence[str], columns: int, resolution: float) -> dict[str, Any]:
    """Thin out points in time to the first of each column. "of": number of all points."""
    shown = points
    if len(points) > columns:
        shown = points[np.unique((points["seconds"] / resolution).astype(np.int64), return_index=True)[1]]
    return {"seconds": times(shown["seconds"], resolution), "of": len(points), **columns_of(shown, names)}


def _spans(spans: Sequence[Span], start: float, end: float, resolution: float) -> dict[str, Any]:
    """Group spans by name, merging neighbours that are closer than the resolution."""
    found: dict[str, list[list[float]]] = {}
    for span in spans:
        if span.end < start or span.start > end:
            continue
        shown = found.setdefault(span.name, [])
        if shown and 0 <= span.start - shown[-1][1] < resolution and span.end - shown[-1][0] < 2 * resolution:
            shown[-1][1] = span.end
        else:
            shown.append([span.start, span.end, span.version])
    return {
        name: {
            "start": times(np.array([start for start, _, _ in shown]), resolution),
            "end": times(np.array([end for _, end, _ in shown]), resolution),
            "version": [int(version) for _, _, version in shown],
        }
        for name, shown in found.items()
    }
