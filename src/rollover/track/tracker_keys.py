"""The metrics of trackers that `track.trackers` names: what metric_keys.py has of them."""

from rollover.track.metric import Metric

TRACKERS = (
    Metric(
        "trackers/failed",
        "counter",
        "",
        "Failures of track.trackers. What your own missed is not told again; tools are told from the run's files.",
    ),
    Metric(
        "trackers/lost",
        "counter",
        "",
        "Rows, evaluations and samples that a tool of track.trackers did not take in time (docs/trackers.md).",
    ),
)
