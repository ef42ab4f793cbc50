"""The trackers of a run: ours (the table TRACKERS), and the custom and external ones that `track.trackers` names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollover import registry
from rollover.config import Config
from rollover.config.run import TOOLS
from rollover.functions import custom_function
from rollover.rollout.lifecycle import RunClock
from rollover.track.health import Health, ignored_figures
from rollover.track.jsonl import EvalFile, MetricsFile
from rollover.track.live import LiveView
from rollover.track.parquet import MetricsTable
from rollover.track.records import RolloutRecorder
from rollover.track.trace import TRACE, Trace, TraceFile
from rollover.track.tracker import CustomTracker, Tracker, Trackers

CUSTOM = "a rollover.Tracker"


@dataclass(frozen=True)
class TrackerSetup:
    """The run that a tracker is built for: its configuration and directory."""

    config: Config
    path: Path


def _trace(setup: TrackerSetup) -> Trace:
    clock = RunClock()
    clock.pause_at(0.0)  # the time of a run excludes model loading
    return Trace(clock, TraceFile(setup.path / TRACE, setup.config.track.trace))


def _metrics_table(setup: TrackerSetup) -> Tracker | None:
    path = setup.path / "metrics.parquet"
    if "parquet" not in setup.config.track.format and not path.exists():  # an existing table stays up to date
        return None
    try:
        return MetricsTable(path, setup.path / "metrics.jsonl")
    except ValueError as error:
        raise ValueError(f"track.format: {error}") from error


# In calling order: files before the live view, because a closed terminal may end the run there. None: not configured.
TRACKERS: dict[str, Callable[[TrackerSetup], Tracker | None]] = {
    "rollouts": lambda setup: RolloutRecorder(
        setup.path / "rollouts",
        enabled=setup.config.records_rollouts,
        formats=setup.config.track.format,
    ),
    "metrics": lambda setup: MetricsFile(setup.path / "metrics.jsonl"),
    "metrics table": lambda setup: _metrics_table(setup),
    "evaluations": lambda setup: EvalFile(setup.path / "eval.jsonl"),
    "trace": _trace,
    "live": lambda setup: LiveView(setup.config.track.live, setup.config.train.num_steps, title=setup.config.run.name),
    "health": lambda setup: Health(ignored_figures(setup.config)),
}


def build_trackers(config: Config, path: Path) -> Trackers:
    """Build all trackers of a run in the directory `path`: custom ones, then ours, then external ones.

    ValueError for an invalid entry of track.trackers or a missing package; OSError if a file cannot be opened.
    """
    trackers = Trackers()
    names = [name for name in config.track.trackers if name in TOOLS]
    # Built first: it refuses a tracker that is not installed.
    external = registry.load("trackers", "external")(names, config.track) if names else None
    setup = TrackerSetup(config, path)
    # Custom trackers come first: after a kill, events in our files are not sent again.
    for spec in config.track.trackers:
        if spec in TOOLS:
            continue
        make_custom = custom_function("track.trackers", spec, CUSTOM)
        tracker = make_custom()
        if not isinstance(tracker, Tracker):
            raise make_custom.refused(repr(tracker))
        trackers.add(spec, CustomTracker(tracker, spec))
    for name, make in TRACKERS.items():
        if (tracker := make(setup)) is not None:
            trackers.add(name, tracker)
    if external is not None:  # last: they read missed rows from our files
        trackers.add("external", external)
    return trackers
