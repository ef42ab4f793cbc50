"""The journal between two checkpoints, while a run goes on: what happens is written at once, progress by a timer.

    Lifecycle.on_event ──▶ Scribe ──▶ Journal ◀── every checkpoint.journal_s: the new tokens of what runs; the mirror

Owns the timer, and when the journal is on the disk. What a record says is journal_scribe.py's business, and when the
journal begins anew is checkpointing.py's.
"""

from __future__ import annotations

import asyncio

from rollover.checkpoint.journal import Journal
from rollover.config import Config
from rollover.rollout.lifecycle import Event
from rollover.rollout.watchdog import salvaged
from rollover.run.directory import RunDirectory
from rollover.run.journal_scribe import Scribe
from rollover.run.parts import Parts
from rollover.run.producer import Producer


class Journaling:
    """Of one run. `is_possible`: whether its groups come through the lifecycle, of which alone a journal tells;
    `is_on`: whether one is written, too (checkpoint.journal_s)."""

    def __init__(self, config: Config, parts: Parts, directory: RunDirectory, producer: Producer) -> None:
        self.parts, self.directory, self.journal_s = parts, directory, config.checkpoint.journal_s
        self.is_possible = producer.generates
        self.is_on = self.is_possible and self.journal_s > 0
        self.journal = Journal(directory.journal, directory.trackers.on_message)
        self.scribe = Scribe(self.journal, parts.history.seconds, lambda: parts.prompts.version)
        self.mirror = directory.mirror
        if self.mirror is not None:
            self.mirror.say = directory.trackers.on_message
        self._timer: asyncio.Task[None] | None = None

    def on_event(self, event: Event) -> None:
        """For Lifecycle.on_event."""
        self.scribe.on_event(event)

    def on_row(self, version: int) -> None:
        """The metrics row of the step that led to trainer `version` is written, and so is the trace up to there.

        What ended the timer is raised here.
        """
        if self.journal.writes:
            with self.scribe.timed():  # a row that the journal knows of is on the disk
                self.directory.metrics.sync()
        self.scribe.on_row(version, self.parts.history.num_bytes)
        if self._timer is not None and self._timer.done():
            self._timer.result()

    def start_timer(self) -> None:
        """From now on progress is written every checkpoint.journal_s, if there is a journal."""
        if self.is_on:
            self._timer = asyncio.ensure_future(self._write_now_and_again())

    def close(self) -> None:
        """End the timer, the journal and the mirror."""
        if self._timer is not None and not self._timer.cancel() and not self._timer.cancelled():
            self._timer.exception()  # seen: what ends it ends the run, too
        self.journal.close()
        if self.mirror is not None:
            self.mirror.close()

    async def _write_now_and_again(self) -> None:
        """An engine that does not say how far it is holds up neither the disk nor the mirror."""
        progress: asyncio.Future[None] | None = None
        try:
            while True:
                await asyncio.sleep(self.journal_s)
                if progress is None:
                    progress = asyncio.ensure_future(self._write_progress())
                done, _ = await asyncio.wait([progress], timeout=self.journal_s)
                if done:
                    progress.result()
                    progress = None
                self.journal.sync()
                if self.mirror is not None:
                    self.mirror.beat()
        finally:
            if progress is not None and not progress.cancel() and not progress.cancelled():
                progress.exception()  # seen: the run ends anyway

    async def _write_progress(self) -> None:
        found = await self.parts.driver.asker.progress(self.scribe.running)
        cache = self.parts.lifecycle.cache
        for rollout in cache.running():
            room = cache.remaining(rollout.rollout_id)
            if believed := salvaged(found.get(rollout.rollout_id, ()), rollout.num_tokens, room):
                self.scribe.progress({rollout.rollout_id: believed})
