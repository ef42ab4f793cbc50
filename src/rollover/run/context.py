"""The objects that the components of one run share."""

from __future__ import annotations

from dataclasses import dataclass

from rollover.checkpoint.journal import Journal
from rollover.config import Config
from rollover.run.directory import RunDirectory
from rollover.run.hooks import Hooks
from rollover.run.parts import Parts
from rollover.run.restart_budget import RestartBudget
from rollover.run.stop import Stop


@dataclass(frozen=True, slots=True)
class RunContext:
    """The configuration, the parts and the directory of one run, and the objects that outlive a lost backend."""

    config: Config
    parts: Parts
    directory: RunDirectory
    hooks: Hooks
    stop: Stop
    restart_budget: RestartBudget
    journal: Journal
    """The files of the event log (event_log.py)."""
    resume_command: str
    """The command that continues the run."""
