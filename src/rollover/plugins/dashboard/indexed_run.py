"""A run's directory with indexes of its metrics, rollouts and trace, for repeated queries."""

from __future__ import annotations

import os

from rollover.plugins.dashboard.columns import Columns
from rollover.plugins.dashboard.metrics import Accounts, HealthWarning, accounts_of, warnings_of
from rollover.plugins.dashboard.rollout_index import RolloutIndex
from rollover.plugins.dashboard.trace_index import TraceIndex
from rollover.run.run_files import METRICS, RunFiles
from rollover.track.trace import TRACE


class IndexedRun(RunFiles):
    """RunFiles with indexes. `rollouts`, `trace`: of the recorded rollouts and of the events. `patience_s`: longest
    time to read new parts of the columns, rollouts or trace at once, unlimited by default."""

    def __init__(self, directory: str | os.PathLike[str], *, patience_s: float = float("inf")) -> None:
        super().__init__(directory)
        self._columns = Columns(self.directory / METRICS)
        self.rollouts = RolloutIndex(self.recorded)
        self.trace = TraceIndex(self.directory / TRACE)
        self._columns.patience = self.rollouts.patience = self.trace.patience = patience_s

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the metrics, the rollouts and the trace that are read."""
        return {"metrics": self._columns.share, "rollouts": self.rollouts.share, "trace": self.trace.share}

    def columns(self) -> Columns:
        """Return the metrics by key, which take much less memory than the rows."""
        self._columns.look()
        return self._columns

    def accounts(self) -> Accounts | None:
        """Return the ledger's accounts after the last step, None before the first."""
        rows = self.metrics()
        return accounts_of(rows[-1]) if rows else None

    def warnings(self) -> list[HealthWarning]:
        """Return the health warnings of the metrics."""
        return warnings_of(self.metrics(), self.config)
