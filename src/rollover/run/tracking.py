"""What the run tells its trackers (track/tracker.py) of a step, once it has been checked.

Owns the last check: a step that breaks a promise (the ledger, the bound of staleness) ends the run before it is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollover.config import Config
from rollover.envs.answer_text import answer_decoder
from rollover.files import atomic_write_text
from rollover.run.context import RunContext
from rollover.run.parts import Parts
from rollover.run.records import Records
from rollover.track.live import Progress
from rollover.trainer.batch import Batch
from rollover.types import Group

TOKENIZER = "tokenizer.json"


class Tracking:
    """Tells the trackers of one run. `recorded`: its groups are from the record of another run, so no bound holds."""

    def __init__(self, context: RunContext, *, recorded: bool) -> None:
        config, parts = self.config, self.parts = context.config, context.parts
        self.trackers, self.recorded = context.directory.trackers, recorded
        self.records = Records(
            self.trackers,
            answer_decoder(parts.loaded.tokenizer, config.rollout.keep_special_tokens),
            lambda sample: (
                not (config.algorithm.advantage_traits.over_tokens or config.distill.replaces_for(sample.role))
            ),
        )

    def on_step(self, row: dict[str, float], groups: list[Group], batch: Batch) -> None:
        """A step trained `batch` of `groups`; `row` is its row of metrics.jsonl."""
        self._check(row)
        trainer = self.parts.trainer
        self.records.tell(trainer.policy_version, groups, batch, trainer.token_stats)
        self.trackers.on_step(row)

    def _check(self, row: dict[str, float]) -> None:
        """No account is wrong, and no bound of staleness is passed: what is wrong is not told."""
        self.parts.lifecycle.check()
        bound = self.config.staleness_bound
        assert self.recorded or row["staleness/max"] <= bound, f"staleness {row['staleness/max']} is above {bound}"
        assert row.get("staleness/replayed_max", 0) <= self.config.replay.max_staleness, "replayed above its bound"


def write_tokenizer(tokenizer: Any, directory: Path) -> None:
    """tokenizer.json beside the records, by which the text of each of their tokens is known wherever they are read; not
    of a tokenizer without one."""
    core, path = getattr(tokenizer, "backend_tokenizer", None), directory / TOKENIZER
    if core is not None and not path.exists():
        atomic_write_text(path, core.to_str())


def step_progress(config: Config, parts: Parts) -> Callable[[], Progress]:
    """How far the step is that is being made. It may be asked from any thread: it looks, and waits for nothing."""

    # Not the parts, and not the trainer: with them a backend that is lost would be held.
    lifecycle, trainer = parts.lifecycle, weakref.ref(parts.trainer)

    def progress() -> Progress:
        ready = sum(group.ready for group in list(lifecycle.cache.groups.values()))
        trained = (0, 0) if (of := trainer()) is None else of.computed.tokens()
        return Progress(ready, config.rollout.groups_per_step, lifecycle.ledger.generated_tokens, *trained)

    return progress
