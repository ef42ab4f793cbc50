"""The journal of a run: the one place where the run tells what happens, begins a new file, and reads the old ones.

    what happens ──▶ JournalWriter ──records──▶ Journal          every checkpoint.journal_s: the new tokens of what runs
    a checkpoint: cut ──▶ journal.commit                  --resume: journal.read ──▶ journal.go_on, or roll_back

Owns when the journal is brought to the disk. What a record says is writer.py's business, when a checkpoint is written
is checkpointing.py's, and what the records of an earlier process mean is replay.py's.
"""

from __future__ import annotations

from contextlib import ExitStack

from rollover.checkpoint.journal import Journal, Mark, Part
from rollover.rollout.watchdog import salvaged
from rollover.run.context import RunContext
from rollover.run.journal.timer import Timer
from rollover.run.journal.writer import JournalWriter
from rollover.run.producer import Producer


class Journaling(JournalWriter):
    """The journal of one run, with its writer and its timer.

    `is_possible`: whether its groups come through the lifecycle, of which alone a journal tells; `is_on`: whether one
    is written, too (checkpoint.journal_s).
    """

    def __init__(self, context: RunContext, producer: Producer) -> None:
        parts, directory = self.parts, self.directory = context.parts, context.directory
        super().__init__(Journal(directory.journal), parts.history.seconds, lambda: parts.prompts.version)
        journal_s = context.config.checkpoint.journal_s
        self.is_possible = producer.generates
        self.is_on = self.is_possible and journal_s > 0
        self._timer = Timer(journal_s, self._write_progress, self._beat)
        self._mirror = directory.mirror

    def counters(self) -> dict[str, float]:
        """The counters of the journal and of the mirror, where the run has them."""
        counters: dict[str, float] = {}
        if self.is_on:
            counters |= {"journal/failed": self.journal.failed, "journal/cut_bytes": self.journal.cut_bytes}
        if self._mirror is not None:
            counters["mirror/failed"] = self._mirror.failed
        return counters

    def on_row_written(self, version: int) -> None:
        """The metrics row of the step that led to trainer `version` is written, and so is the trace up to there.

        What ended the timer is raised here.
        """
        if self.journal.writes:
            with self.timed():  # a row that the journal knows of is on the disk
                self.directory.metrics.sync()
        self.on_row(version, self.parts.history.num_bytes)
        self._timer.check()

    def cut(self, checkpoint: str | None) -> Mark | None:
        """A new file begins, at a moment at which nothing runs: that of a checkpoint, or (None) the start of the run.

        Returns where it goes on from there; None where no journal is written.
        """
        return self.begin(checkpoint) if self.is_on else None

    def roll_back(self, part: Part) -> None:
        """Write at the end of `part`, the last one, that its steps are lost: no later start trains them again."""
        self.journal.go_on(part)
        self.on_roll_back()
        self.journal.halt()

    def start_timer(self) -> None:
        """From now on progress is written every checkpoint.journal_s, if there is a journal."""
        if self.is_on:
            self._timer.start()

    def close(self) -> None:
        """End the timer, the journal and the mirror."""
        with ExitStack() as rest:  # each of them, even if another fails
            if self._mirror is not None:
                rest.callback(self._mirror.close)
            rest.callback(self.journal.close)
            self._timer.close()

    # Private

    async def _write_progress(self) -> None:
        found = await self.parts.driver.asker.progress(self.running)
        cache = self.parts.lifecycle.cache
        for rollout in cache.running():
            room = cache.remaining(rollout.rollout_id)
            if believed := salvaged(found.get(rollout.rollout_id, ()), rollout.num_tokens, room):
                self.progress({rollout.rollout_id: believed})

    def _beat(self) -> None:
        """An engine that does not say how far it is holds up neither the disk nor the mirror."""
        self.journal.sync()
        if self._mirror is not None:
            self._mirror.beat()
