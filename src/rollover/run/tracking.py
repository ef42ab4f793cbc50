"""Who is told of what happens in a run: one call for each event. What is told is written down, counted or shown.

Owns the order in which they are told: a figure is in its file before anyone sees it.
"""

from __future__ import annotations

from rollover.config import Config
from rollover.rollout.lifecycle import Event
from rollover.run.directory import RunDirectory
from rollover.run.own_metrics import own_metrics
from rollover.run.parts import Parts
from rollover.run.records import Records
from rollover.track.health import Health
from rollover.track.live import LiveView
from rollover.trainer.batch import Batch
from rollover.types import Group


class Tracking:
    """Of one run. `recorded`: its groups are those of another run's record, so that they are not recorded again."""

    def __init__(
        self, config: Config, parts: Parts, directory: RunDirectory, view: LiveView, *, recorded: bool
    ) -> None:
        self.config, self.parts, self.directory, self.view = config, parts, directory, view
        self.recorded = recorded
        self.records = Records(
            directory.rollouts, parts.loaded.tokenizer.decode, config.track.rollouts and not recorded
        )
        self.own_metrics = own_metrics(config.track.metrics)
        self.health = Health(() if config.algorithm.compares_siblings else ("groups/zero_variance",))

    def on_event(self, event: Event) -> None:
        """Something happened to a group or a rollout: see Lifecycle.on_event."""
        self.parts.history.on_event(event)
        self.records.on_event(event)

    def on_step(self, row: dict[str, float], groups: list[Group], batch: Batch) -> None:
        """A step trained `batch` of `groups`; `row` is its row of metrics.jsonl."""
        self._check(row)
        self.records.write(self.parts.trainer.policy_version, groups, batch)
        self.directory.metrics.write(row)
        self.parts.history.flush()
        self.view.update(row)
        for warning in self.health.look(row):
            self.view.message(f"health: {warning}")

    def _check(self, row: dict[str, float]) -> None:
        """No account is wrong, and no bound of staleness is passed: what is wrong is not written down."""
        self.parts.lifecycle.check()
        bound = self.config.staleness_bound
        assert self.recorded or row["staleness/max"] <= bound, f"staleness {row['staleness/max']} is above {bound}"
        assert row.get("staleness/replayed_max", 0) <= self.config.replay.max_staleness, "replayed above its bound"
