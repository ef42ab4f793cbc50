"""`rollover trace`: reads traces of run directories; prints a summary, or writes a picture or a Perfetto file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rollover.files import check_output_file, did_you_mean_path
from rollover.rollout.lifecycle import EventKind
from rollover.track.live import count, percent
from rollover.track.perfetto import perfetto
from rollover.track.picture import draw
from rollover.track.sinks import atomic_write_text
from rollover.track.trace import TRACE, TraceEvent, busy_share, engine_visits, read_trace, spans


def show_traces(run_dirs: Sequence[Path], to_perfetto: Path | None, to_svg: Path | None) -> int:
    """Exit code. ValueError where a run has no trace, or an output cannot be written there."""
    if to_perfetto is not None and len(run_dirs) > 1:
        raise ValueError("--perfetto takes one RUN_DIR: a file has one clock")
    for option, path in (("--perfetto", to_perfetto), ("--svg", to_svg)):
        if path is not None:
            check_output_file(path, option)
    traces = [(str(path), _read(path)) for path in run_dirs]
    if to_perfetto is not None:
        _write(to_perfetto, json.dumps(perfetto(traces[0][1])))
    if to_svg is not None:
        _write(to_svg, draw(traces))
    if to_perfetto is None and to_svg is None:
        print("\n\n".join(summary(title, events) for title, events in traces))
    return 0


def summary(title: str, events: Sequence[TraceEvent]) -> str:
    """A few lines of text: what happened, and where the time went."""
    visits, of_spans = engine_visits(events), spans(events)
    seconds = events[-1].seconds if events else 0.0
    kinds = [e.kind for e in events]
    num_slots = len({(s.engine, s.slot) for s in visits})
    num_parked = sum(s.parked for s in visits)
    counts = ", ".join(f"{kind.value} {kinds.count(kind.value)}" for kind in EventKind)
    by_name = {name: sum(s.end - s.start for s in of_spans if s.name == name) for name, *_ in of_spans}
    times = ", ".join(f"{name} {time:.1f} s ({percent(time / seconds)})" for name, time in by_name.items() if seconds)
    return "\n".join(
        [
            f"{title}: {kinds.count('train_end')} steps, {seconds:.1f} s",
            f"  time    {times}",
            f"  events  {counts}",
            f"  tokens  {count(sum(n for s in visits for _, n in s.segments))} generated",
            f"  slots   {num_slots}, busy {percent(busy_share(events))} of generation",
            f"  visits  {len(visits)} to the engine, of which {num_parked} were interrupted and rolled over",
        ]
    )


def _read(run_dir: Path) -> list[TraceEvent]:
    path = run_dir / TRACE
    if not path.is_file():
        if not run_dir.is_dir():
            raise ValueError(f"there is no folder {run_dir}{did_you_mean_path(run_dir)}")
        raise ValueError(f"{run_dir} has no {TRACE}: it is no run directory, or the run had track.trace = false")
    return read_trace(path)


def _write(path: Path, text: str) -> None:
    atomic_write_text(path, text)
    print(path)
