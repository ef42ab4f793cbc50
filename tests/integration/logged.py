"""`rollover` with a log of what its engine does, written at once: what a killed run had, whatever it says of itself.

python logged.py LOG train RECIPE ...
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from rollover import cli
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest

log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)


def note(**fields: Any) -> None:
    os.write(log, json.dumps(fields | {"time": time.monotonic()}).encode() + b"\n")


class Logged(EmbeddedEngine):
    """Tells of every call from which token on, of every step how many tokens each rollout has, and of every beat."""

    async def extend(self, request: ExtendRequest) -> Any:
        note(kind="extend", rollout=request.rollout_id, tokens=len(request.generated_ids))
        return await super().extend(request)

    def step(self) -> None:
        running = [s for s in self._batcher.active()]
        super().step()
        note(kind="step", tokens={s.request.rollout_id: s.next_index for s in running})

    async def progress(self, rollout_ids: Iterable[str]) -> Any:
        found = await super().progress(rollout_ids)
        note(kind="beat")
        return found


def main() -> int:
    from rollover.engine import build

    build.EmbeddedEngine = Logged  # pyright: ignore[reportAttributeAccessIssue]
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
