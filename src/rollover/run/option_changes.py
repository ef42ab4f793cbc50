"""Options that are changed while a run goes on: asked for at any time, changed between two steps.

Owns what was asked for. Which options can change, and how, is config/resume.py's business.
"""

from __future__ import annotations

import logging
from typing import Any

from rollover.config import Config
from rollover.config import resume as resume_rules
from rollover.config.table import value_of
from rollover.run.checkpointing import Checkpointing

logger = logging.getLogger(__name__)


class OptionChanges:
    """The changes of options in a run of `config`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._wanted: dict[str, Any] = {}

    def ask_for(self, key: str, value: Any) -> None:
        """Change an option from the next step on. ConfigError where it cannot (config/resume.py)."""
        resume_rules.check_in_run(self.config, key, value)
        self._wanted[key] = value

    async def make(self, checkpointing: Checkpointing) -> None:
        """Change what was asked for, and write it down; nothing if all of it is as it was.

        `checkpointing`: of the run, whose checkpoints it writes.
        """
        changes = [resume_rules.Change(k, value_of(self.config, k), value) for k, value in self._wanted.items()]
        if not (changes := [change for change in changes if change.old != change.new]):
            return
        if checkpointing.event_log.is_on and resume_rules.trains_otherwise(changes, self.config):
            await checkpointing.checkpoint()  # steps that a journal tells of are trained again as they were
        for change in changes:
            resume_rules.change_in_run(self.config, change.key, change.new)
        checkpointing.directory.write_config(replace=True)
        logger.info("changed from here on: " + ", ".join(map(str, changes)))
