"""`rollover` with a log of what its servers gave it, token by token, written at once: whatever it says of itself.

python logged_remote.py LOG train RECIPE ...
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rollover import cli
from rollover.engine.protocol import ExtendRequest
from rollover.engine.remote import engine as remote
from rollover.engine.remote.extend_state import ExtendState

log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)


def note(**fields: Any) -> None:
    os.write(log, json.dumps(fields).encode() + b"\n")


class LoggedGeneration(ExtendState):
    """Tells from which token on a rollout is asked for, and every token that it gets."""

    def __init__(self, request: ExtendRequest, *args: Any) -> None:
        super().__init__(request, *args)
        note(kind="extend", rollout=request.rollout_id, start=len(request.generated_ids))

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        before = len(self.tokens)
        super().add(token_ids, logprobs, version)
        note(
            kind="tokens",
            rollout=self.request.rollout_id,
            start=len(self.request.generated_ids) + before,
            tokens=self.tokens[before:],
            logprobs=self.logprobs[before:],
        )


class LoggedEngine(remote.RemoteEngine):
    """Tells when it was asked how far its rollouts are: what they had then gets into the journal."""

    async def progress(self, rollout_ids: Iterable[str]) -> Any:
        found = await super().progress(rollout_ids)
        note(kind="beat")
        return found


def main() -> int:
    from rollover.engine import build

    remote.ExtendState = LoggedGeneration  # pyright: ignore[reportAttributeAccessIssue]
    build.RemoteEngine = LoggedEngine  # pyright: ignore[reportAttributeAccessIssue]
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
