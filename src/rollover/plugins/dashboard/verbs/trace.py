"""`rollover trace`: print what happened in a run, or write it as a picture or a Perfetto file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollover.commands import Overrides, Verb

if TYPE_CHECKING:
    from rollover.track.trace import TraceEvent


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dirs", nargs="+", metavar="RUN_DIR", type=Path, help="a run's directory; the SVG takes two")
    add("--perfetto", metavar="OUT.json", type=Path, help="write one run for ui.perfetto.dev")
    add("--svg", metavar="OUT.svg", type=Path, help="draw the runs, one above the other")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    return show_traces(args.run_dirs, args.perfetto, args.svg)


def show_traces(run_dirs: Sequence[Path], to_perfetto: Path | None, to_svg: Path | None) -> int:
    """Print or write traces; returns the exit code. ValueError without a trace, or for an invalid output path."""
    from rollover.files import check_output_file
    from rollover.text import printable_lines
    from rollover.track.perfetto import perfetto
    from rollover.track.trace_svg import draw

    if to_perfetto is not None and len(run_dirs) > 1:
        raise ValueError("--perfetto takes one RUN_DIR: a file has one clock")
    for option, path in (("--perfetto", to_perfetto), ("--svg", to_svg)):
        if path is not None:
            check_output_file(path, option)
    traces = [(str(path), read(path)) for path in run_dirs]
    if to_perfetto is not None:
        write(to_perfetto, json.dumps(perfetto(traces[0][1])))
    if to_svg is not None:
        write(to_svg, draw(traces))
    if to_perfetto is None and to_svg is None:
        print(printable_lines("\n\n".join(summary(title, events) for title, events in traces)))
    return 0


def summary(title: str, events: Sequence[TraceEvent]) -> str:
    """Return a few lines of text: counts of events, and the use of time."""
    from rollover.rollout.lifecycle import EventKind
    from rollover.track.figures import count, percent
    from rollover.track.trace import acts, busy_share, engine_visits, spans

    visits, of_spans = engine_visits(events), spans(events)
    seconds = events[-1].seconds if events else 0.0
    kinds = [e.kind for e in events]
    num_slots = len({(v.engine, v.slot) for v in visits})
    num_parked = sum(v.parked for v in visits)
    acting = [act.seconds for act in acts(events)]
    worked = (
        f"  acting  {len(acting)} times: environments and agents worked {sum(acting):.1f} s,"
        f" {max(acting, default=0.0):.1f} at most"
    )
    counts = ", ".join(f"{kind.value} {kinds.count(kind.value)}" for kind in EventKind)
    by_name = {name: sum(s.end - s.start for s in of_spans if s.name == name) for name, *_ in of_spans}
    times = ", ".join(f"{name} {time:.1f} s ({percent(time / seconds)})" for name, time in by_name.items() if seconds)
    return "\n".join(
        [
            f"{title}: {kinds.count('train_end')} steps, {seconds:.1f} s",
            f"  time    {times}",
            f"  events  {counts}",
            f"  tokens  {count(sum(n for v in visits for _, n in v.segments))} generated",
            f"  slots   {num_slots}, busy {percent(busy_share(events))} of generation",
            f"  visits  {len(visits)} to the engine, of which {num_parked} were interrupted and rolled over",
            *([worked] if acting else []),
        ]
    )


def read(run_dir: Path) -> list[TraceEvent]:
    """Read the trace of a run; ValueError without one."""
    from rollover.plugins.dashboard.indexed_run import IndexedRun
    from rollover.track.trace import TRACE

    files = IndexedRun(run_dir)
    if not (run_dir / TRACE).is_file():
        raise ValueError(f"{run_dir} has no {TRACE}: the run had track.trace = false, or has made no step yet")
    return list(files.events())


def write(path: Path, text: str) -> None:
    from rollover.files import atomic_write_text

    atomic_write_text(path, text)
    print(path)


VERB = Verb("Show what happened in a run, and when.", run, arguments, files="", keys=False)
