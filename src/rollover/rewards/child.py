"""What runs in a reward worker's process: the reward functions (rewards/client.py is the parent's end).

Owns the child's end of the protocol (JSON lines; rewards/wire.py) and its memory limit. A function that the program of
the parent handed over comes inside the message that loads it (rewards/travel.py). Functions run in the main thread, so
they may use signal.alarm. It never limits time: the parent kills it. A copy of it that a function forked, and that
comes back out of the function, ends there.

    in   {"op": "load", "spec"}                    out  {"pid", "mode": "each" | "together" | "batch"} | a failure
    in   {"op": "score", "spec", "items": [...]}   out  each, together: a line for each item as it is scored,
                                                        {"index", "result": {"score", "extras"} | a failure}
                                                        batch: {"results": [...]} | a failure

Each line in has a "call", and each line out that of what it answers. A failure is {"error": text}, with
"out_of_memory": true after a MemoryError. "each" calls the function for one item after the other, "together" (async
def) for all of them at a time on one event loop, "batch" once for all of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

from rollover.functions import explained
from rollover.rewards.registry import Item, LoadedReward, runner
from rollover.rewards.several import LoadedSum, loaded
from rollover.rewards.travel import unpacked
from rollover.rewards.wire import line_of

_MAX_ERROR_CHARS = 2000


def main(base_dir: str, memory_bytes: str) -> None:
    """Serve on the standard input and output. `memory_bytes`: 0 is no limit."""
    if limit := int(memory_bytes):
        _limit_memory(limit)
    # User code may print and read: the protocol gets private descriptors, its fd 1 is stderr and its fd 0 is empty.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    sys.path[:0] = [base_dir, os.getcwd()]
    serve(requests, replies, base_dir)


def serve(requests: TextIO, replies: TextIO, base_dir: str) -> None:
    """Answer requests until the input ends."""
    rewards: dict[str, LoadedReward | LoadedSum] = {}
    own_pid, call = os.getpid(), 0

    def reply(message: dict[str, Any]) -> None:
        if os.getpid() != own_pid:
            os._exit(0)  # a copy that the function forked: neither reply nor the next request are for it
        replies.write(line_of({"call": call, **message}))
        replies.flush()

    for line in requests:
        request = json.loads(line)
        spec, call = request["spec"], request["call"]
        if request["op"] == "load":
            try:
                function = unpacked(request) if "function" in request else None
                rewards[spec] = loaded(spec, base_dir, function)
            except ValueError as error:
                reply({"pid": own_pid, "error": str(error)[:_MAX_ERROR_CHARS]})
            else:
                reply({"pid": own_pid, "mode": rewards[spec].mode})
        else:
            _score(rewards[spec], request["items"], reply)


def _score(reward: LoadedReward | LoadedSum, items: list[Item], reply: Callable[[dict[str, Any]], None]) -> None:
    """Score the items and reply. An alarm that a function left pending would kill a later call: it is cleared."""
    if isinstance(reward, LoadedSum) or reward.mode == "batch":
        try:
            message = {"results": reward.score_all(items)}
        except BaseException as error:  # boundary: the user's function, KeyboardInterrupt included
            message = _failure(error)
        _clear_alarm()
        reply(message)
    elif reward.mode == "together":
        runner().run(_score_together(reward, items, reply))
        _clear_alarm()
    else:
        for index, item in enumerate(items):
            try:
                result = reward.score_one(item)
            except BaseException as error:  # boundary: the user's function, KeyboardInterrupt included
                result = _failure(error)
            _clear_alarm()
            reply({"index": index, "result": result})


async def _score_together(reward: LoadedReward, items: list[Item], reply: Callable[[dict[str, Any]], None]) -> None:
    async def one(index: int, item: Item) -> None:
        try:
            result = await reward.score_async(item)
        except BaseException as error:  # boundary: the user's function, KeyboardInterrupt included
            result = _failure(error)
        reply({"index": index, "result": result})

    await asyncio.gather(*(one(index, item) for index, item in enumerate(items)))


def _failure(error: BaseException) -> dict[str, Any]:
    failure: dict[str, Any] = {"error": explained(error)}
    return failure | {"out_of_memory": True} if isinstance(error, MemoryError) else failure


def _clear_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory(num_bytes: int) -> None:
    """Limit private memory that can be written, not addresses: what a library only reserves costs nothing."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
