"""The trackers of a run: ours, by the table TRACKERS, and those that `track.trackers` names: the user's own, and tools
of others (trackers/)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollover import registry
from rollover.config import Config
from rollover.config.run import TOOLS
from rollover.functions import own_function
from rollover.rollout.lifecycle import RunClock
from rollover.track.health import Health, passed_over
from rollover.track.jsonl import EvalFile, MetricsFile
from rollover.track.live import LiveView
from rollover.track.metrics_table import MetricsTable
from rollover.track.recorder import RolloutRecorder
from rollover.track.trace import TRACE, Trace, TraceFile
from rollover.track.tracker import OwnTracker, Tracker, Trackers

OWN = "a rollover.Tracker"


@dataclass(frozen=True)
class TrackerSetup:
    """What a tracker is made for: a run of `config` in the directory `path`."""

    config: Config
    path: Path


def _trace(setup: TrackerSetup) -> Trace:
    clock = RunClock()
    clock.pause_at(0.0)  # loading a model is no part of a run's time
    return Trace(clock, TraceFile(setup.path / TRACE, setup.config.track.trace))


def _metrics_table(setup: TrackerSetup) -> Tracker | None:
    path = setup.path / "metrics.parquet"
    if "parquet" not in setup.config.track.format and not path.exists():  # one that is there does not fall behind
        return None
    try:
        return MetricsTable(path, setup.path / "metrics.jsonl")
    except ValueError as error:
        raise ValueError(f"track.format: {error}") from error


# In the order in which they are told: files before what is shown, since a reader that went away ends the run there.
# None: the configuration asks for none.
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
    "health": lambda setup: Health(passed_over(setup.config)),
}


def build_trackers(config: Config, path: Path) -> Trackers:
    """All of a run in the directory `path`, the user's own before ours, tools of others after them. ValueError for an
    entry of track.trackers that names no tracker, or a tool that is not installed; OSError where a file cannot be
    opened."""
    trackers = Trackers()
    names = [name for name in config.track.trackers if name in TOOLS]
    # Built first: it refuses a tool that is not installed.
    tools = registry.load("trackers", "tools")(names, config.track) if names else None
    setup = TrackerSetup(config, path)
    # What our files have is not told again, after a kill: so it has been told to the user's own by then.
    for spec in config.track.trackers:
        if spec in TOOLS:
            continue
        make_own = own_function("track.trackers", spec, OWN)
        tracker = make_own()
        if not isinstance(tracker, Tracker):
            raise make_own.refused(repr(tracker))
        trackers.add(spec, OwnTracker(tracker, spec))
    for name, make in TRACKERS.items():
        if (tracker := make(setup)) is not None:
            trackers.add(name, tracker)
    if tools is not None:  # they read what they missed in our files, which have it by then
        trackers.add("tools", tools)
    return trackers
