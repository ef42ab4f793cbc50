"""Child processes of the tests of reward workers: whether they live, and time limits that no test has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest

import virtual_time
from rollover.process_tree import has_ended
from rollover.rewards import worker as reward_worker
from rollover.workers import worker

_T = TypeVar("_T")
LIMIT = {"timeout_s": 100.0}  # that nothing comes near but what hangs: its time is skipped


def alive(pid: int) -> bool:
    return not has_ended(pid)


def wait_until_dead(pids: Iterable[int], limit_s: float = 60.0) -> bool:
    """Whether all of them have ended within `limit_s`."""
    pids, deadline = list(pids), time.monotonic() + limit_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def skipping(work: Coroutine[Any, Any, _T], sign: str = "hangs") -> _T:
    """Run it on a loop that goes on by 150 s whenever the file `sign` says that a function hangs."""

    async def run() -> _T:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_time.SkippingLoop)
        with pytest.MonkeyPatch.context() as patch:
            for module in (reward_worker, worker):
                patch.setattr(module, "time", loop)
            skips = asyncio.create_task(loop.skip_where_it_hangs(Path(sign), 150))
            try:
                return await work
            finally:
                skips.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await skips

    with asyncio.Runner(loop_factory=virtual_time.SkippingLoop) as runner:
        return runner.run(run())
