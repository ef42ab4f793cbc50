"""Asks the engine, and again, ever less often, when it answers with nothing though nobody interrupted it.

Owns those pauses, and counts those answers. The rollout counts as running meanwhile, so that the watchdog sees one
without a token, and an interruption ends a pause as it ends an extension.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from rollover.engine.protocol import Engine, ExtendRequest
from rollover.types import Segment, StopReason

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 1.0


class Asker:
    """`extend` and `interrupt` of `engine`. `say` prints a line, once for every rollout that gets nothing for long."""

    def __init__(self, engine: Engine, say: Callable[[str], None]) -> None:
        self._engine, self._say = engine, say
        self._interrupted: dict[str, asyncio.Event] = {}  # of what is asked for
        self._num_empty = 0

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        """At least one token, or a stop, or nothing because it was interrupted."""
        rollout_id, pause_s = request.rollout_id, _FIRST_PAUSE_S
        interrupted = self._interrupted[rollout_id] = asyncio.Event()
        try:
            while True:
                segments = await self._engine.extend(request)
                if interrupted.is_set() or any(map(len, segments)) or segments[-1].stop_reason is not StopReason.PAUSED:
                    return segments
                self._num_empty += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(interrupted.wait(), pause_s)
                    return segments
                if pause_s < _LONGEST_PAUSE_S <= 2 * pause_s:
                    self._say(
                        f"the engine answers without a token for rollout {rollout_id}, though nobody interrupted it: it"
                        f" is asked again every {_LONGEST_PAUSE_S:g} s"
                    )
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            del self._interrupted[rollout_id]

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        """Of these, or of all."""
        asked = self._interrupted.keys() if rollout_ids is None else set(rollout_ids := list(rollout_ids))
        for rollout_id in asked & self._interrupted.keys():
            self._interrupted[rollout_id].set()
        self._engine.interrupt(rollout_ids)

    def stats(self) -> dict[str, float]:
        """Cumulative counters."""
        return {"engine/empty_answers": self._num_empty}
