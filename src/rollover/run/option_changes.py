"""Options that are changed while a run goes on: asked for at any time, changed between two steps.

Owns what was asked for. Which options can change, and how, is config/resume.py's business.
"""

from __future__ import annotations

from typing import Any

from rollover.config import resume as resume_rules
from rollover.config.table import value_of
from rollover.run.checkpointing import Checkpointing


class OptionChanges:
    """The changes of options in the run whose checkpoints `checkpointing` writes."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        self.checkpointing, self.config = checkpointing, checkpointing.config
        self._wanted: dict[str, Any] = {}

    def ask_for(self, key: str, value: Any) -> None:
        """Change an option from the next step on. ConfigError where it cannot (config/resume.py)."""
        resume_rules.check_in_run(self.config, key, value)
        self._wanted[key] = value

    async def make(self) -> None:
        """Change what was asked for, and write it down; nothing if all of it is as it was."""
        changes = [resume_rules.Change(k, value_of(self.config, k), value) for k, value in self._wanted.items()]
        self._wanted.clear()
        if not (changes := [change for change in changes if change.old != change.new]):
            return
        if self.checkpointing.journaling.is_on and resume_rules.trains_otherwise(changes, self.config):
            await self.checkpointing.checkpoint()  # steps that a journal tells of are trained again as they were
        for change in changes:
            resume_rules.change_in_run(self.config, change.key, change.new)
        self.checkpointing.directory.write_config(replace=True)
        self.checkpointing.trackers.on_message("changed from here on: " + ", ".join(map(str, changes)))
