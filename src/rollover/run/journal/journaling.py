"""The journal of a run: the one place where the run tells what happens, begins a new file, and reads the old ones.

    what happens ──▶ Scribe ──records──▶ Journal          every checkpoint.journal_s: the new tokens of what runs
    a checkpoint: cut ──▶ committed                       --resume: read ──▶ go_on, or roll_back

Owns when the journal is brought to the disk. What a record says is scribe.py's business, when a checkpoint is written
is checkpointing.py's, and what the records of an earlier process mean is replay.py's.
"""

from __future__ import annotations

from contextlib import ExitStack

from rollover.checkpoint.journal import Journal, Mark, Part
from rollover.config import Config
from rollover.rollout.lifecycle import Event
from rollover.rollout.watchdog import salvaged
from rollover.run.directory import RunDirectory
from rollover.run.journal.scribe import Scribe
from rollover.run.journal.timer import Timer
from rollover.run.parts import Parts
from rollover.run.producer import Producer


class Journaling:
    """The journal of one run.

    `is_possible`: whether its groups come through the lifecycle, of which alone a journal tells; `is_on`: whether one
    is written, too (checkpoint.journal_s).
    """

    def __init__(self, config: Config, parts: Parts, directory: RunDirectory, producer: Producer) -> None:
        self.parts, self.directory = parts, directory
        self.is_possible = producer.generates
        self.is_on = self.is_possible and config.checkpoint.journal_s > 0
        self._journal = Journal(directory.journal)
        self._scribe = Scribe(self._journal, parts.history.seconds, lambda: parts.prompts.version)
        self._timer = Timer(config.checkpoint.journal_s, self._write_progress, self._beat)
        self._mirror = directory.mirror

    @property
    def writes(self) -> bool:
        """Whether what happens is written now."""
        return self._journal.writes

    @property
    def num_bytes(self) -> int:
        """Size of the files since the newest committed checkpoint."""
        return self._journal.num_bytes

    @property
    def seconds(self) -> float:
        """Spent on writing, cumulative."""
        return self._scribe.seconds

    def counters(self) -> dict[str, float]:
        """The counters of the journal and of the mirror, where the run has them."""
        counters: dict[str, float] = {}
        if self.is_on:
            counters |= {"journal/failed": self._journal.failed, "journal/cut_bytes": self._journal.cut_bytes}
        if self._mirror is not None:
            counters["mirror/failed"] = self._mirror.failed
        return counters

    # What happens

    def on_event(self, event: Event) -> None:
        """For Lifecycle.on_event."""
        self._scribe.on_event(event)

    def on_step(self, version: int) -> None:
        """The step at trainer `version` has trained what was consumed for it."""
        self._scribe.on_step(version)

    def on_published(self, version: int) -> None:
        """The weights of the trainer's `version` are live."""
        self._scribe.on_published(version)

    def on_row(self, version: int) -> None:
        """The metrics row of the step that led to trainer `version` is written, and so is the trace up to there.

        What ended the timer is raised here.
        """
        if self.writes:
            with self._scribe.timed():  # a row that the journal knows of is on the disk
                self.directory.metrics.sync()
        self._scribe.on_row(version, self.parts.history.num_bytes)
        self._timer.check()

    # Files

    def cut(self, checkpoint: str | None) -> Mark | None:
        """A new file begins, at a moment at which nothing runs: that of a checkpoint, or (None) the start of the run.

        Returns where it goes on from there; None where no journal is written.
        """
        return self._scribe.begin(checkpoint) if self.is_on else None

    def committed(self, mark: Mark) -> None:
        """The checkpoint that was cut at `mark` is committed: what came before it is deleted."""
        self._journal.commit(mark)

    def discard(self) -> None:
        """Delete all files: they belong to nothing that is resumed."""
        self._journal.discard()

    def read(self, mark: Mark | None) -> list[Part]:
        """What is trusted of the files from `mark` on, in order: see Journal.read."""
        return self._journal.read(mark)

    def go_on(self, part: Part) -> None:
        """Write on after what is trusted of a file that `read` gave."""
        self._journal.go_on(part)

    def roll_back(self, part: Part) -> None:
        """Write at the end of `part`, the last one, that its steps are lost: no later start trains them again."""
        self._journal.go_on(part)
        self._scribe.on_roll_back()
        self._journal.halt()

    def halt(self) -> None:
        """Write no more until the next `cut`."""
        self._journal.halt()

    def start_timer(self) -> None:
        """From now on progress is written every checkpoint.journal_s, if there is a journal."""
        if self.is_on:
            self._timer.start()

    def close(self) -> None:
        """End the timer, the journal and the mirror."""
        with ExitStack() as rest:  # each of them, even if another fails
            if self._mirror is not None:
                rest.callback(self._mirror.close)
            rest.callback(self._journal.close)
            self._timer.close()

    # Private

    async def _write_progress(self) -> None:
        found = await self.parts.driver.asker.progress(self._scribe.running)
        cache = self.parts.lifecycle.cache
        for rollout in cache.running():
            room = cache.remaining(rollout.rollout_id)
            if believed := salvaged(found.get(rollout.rollout_id, ()), rollout.num_tokens, room):
                self._scribe.progress({rollout.rollout_id: believed})

    def _beat(self) -> None:
        """An engine that does not say how far it is holds up neither the disk nor the mirror."""
        self._journal.sync()
        if self._mirror is not None:
            self._mirror.beat()
