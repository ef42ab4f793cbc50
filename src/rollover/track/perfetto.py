"""A trace as Chrome trace events, the JSON that ui.perfetto.dev and chrome://tracing open.

One process per engine with one track per slot: a slice per segment, named by rollout and policy version. One process
for environments and agents at work, with as many tracks as were at work at once. One for the loop with a track per kind
of span; weight syncs are instants. Format: "Trace Event Format" (Google, 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollover.track.trace import PUBLISH, TraceEvent, acts, engine_visits, spans

_ACTING, _LOOP = 0, 1  # process ids; engine i has _LOOP + 1 + i


def perfetto(events: Sequence[TraceEvent]) -> dict[str, Any]:
    """Convert to a JSON-able dict, times in microseconds."""
    visits, of_spans = engine_visits(events), spans(events)
    names = list(dict.fromkeys(["generate", "train", PUBLISH, *(s.name for s in of_spans)]))
    tracks: dict[tuple[int, int], tuple[str, str]] = {(_LOOP, i): ("loop", name) for i, name in enumerate(names)}
    slices: list[dict[str, Any]] = []
    for span in of_spans:
        args = {"trainer_version": span.version}
        slices.append(_slice(f"{span.name} v{span.version}", _LOOP, names.index(span.name), span.start, span.end, args))
    for event in events:
        if event.kind == PUBLISH:
            instant = {"name": f"v{event.version}", "ph": "i", "s": "g", "ts": _micros(event.seconds)}
            slices.append(instant | {"pid": _LOOP, "tid": names.index(PUBLISH), "cat": "loop"})
    for visit in visits:
        process = _LOOP + 1 + visit.engine
        tracks[process, visit.slot] = f"engine {visit.engine}", f"slot {visit.slot}"
        for version, tokens, start, end in visit.bars():
            name = f"{visit.group}-{visit.sibling} v{version}"
            args = {"tokens": tokens, "resumed": visit.resumed, "parked": visit.parked, "dropped": visit.dropped}
            slices.append(_slice(name, process, visit.slot, start, end, args))
    for act in acts(events):
        tracks[_ACTING, act.lane] = "environments", f"at work {act.lane}"
        slices.append(_slice(f"{act.group}-{act.sibling}", _ACTING, act.lane, act.start, act.end, {}))
    named = []
    for (pid, tid), (process, track) in sorted(tracks.items()):
        named += [_name("process_name", pid, tid, process), _name("thread_name", pid, tid, track)]
    return {"traceEvents": named + slices, "displayTimeUnit": "ms"}


def _slice(name: str, pid: int, tid: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    begin = _micros(start)
    category = {_LOOP: "loop", _ACTING: "acting"}.get(pid, "segment")
    times = {"ts": begin, "dur": _micros(end) - begin}
    return {"name": name, "cat": category, "ph": "X", **times, "pid": pid, "tid": tid, "args": args}


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
