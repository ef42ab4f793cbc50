"""Process of a reward worker, which runs the reward functions (parent's end: rewards/worker.py).

The load message contains a function object of the parent as a pickle (rewards/serialization.py). Functions run in the
main thread, so they may use signal.alarm. The parent limits time by killing the process; services get the remaining
time.

    in   {"op": "load", "spec"}                    out  {"pid", "mode": "each" | "together" | "batch"} | a failure
    in   {"op": "score", "spec", "items": [...],
          "limit_s": of the call}                  out  each, together: a reply for each item as it is scored,
                                                        {"index", "result": {"score", "extras"} | a failure}
                                                        batch: {"results": [...]} | a failure

A failure is {"error": text}, with "out_of_memory": true after a MemoryError. Mode "each" calls the function for one
item after another, "together" (async def) for all items concurrently on one event loop, "batch" once for all items.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from rollover.processes import limit_memory
from rollover.rewards import service
from rollover.rewards.registry import MAX_REPLY_BYTES, CompositeReward, Item, LoadedReward, load, runner
from rollover.rewards.serialization import unpacked
from rollover.workers.child import Calls, ReplyTooLong, clear_alarm, failure_of

_MAX_ERROR_CHARS = 2000


def main(base_dir: str, memory_bytes: str) -> None:
    """Answer calls until the parent ends. `memory_bytes`: 0 is no limit."""
    limit_memory(int(memory_bytes))
    calls = Calls(MAX_REPLY_BYTES)
    sys.path[:0] = [base_dir, os.getcwd()]
    rewards: dict[str, LoadedReward | CompositeReward] = {}
    own_pid = os.getpid()
    for call in calls:
        spec = call["spec"]
        if call["op"] == "load":
            try:
                rewards[spec] = load(spec, base_dir, unpacked(call))
            except ValueError as error:
                calls.reply(pid=own_pid, error=str(error)[:_MAX_ERROR_CHARS])
            else:
                calls.reply(pid=own_pid, mode=rewards[spec].mode)
        else:
            _score(rewards[spec], call["items"], calls, call["limit_s"])


def _score(reward: LoadedReward | CompositeReward, items: list[Item], calls: Calls, limit_s: float) -> None:
    """Score the items and reply. Clear an alarm that a function left pending, which would kill a later call."""
    service.set_deadline(limit_s)
    if reward.mode == "batch":
        try:
            message = {"results": reward.score_all(items)}
        except BaseException as error:  # boundary: the user's function, KeyboardInterrupt included
            message = failure_of(error)
        clear_alarm()
        try:
            calls.reply(**message)
        except ReplyTooLong as error:
            calls.reply(**_too_long(error))
    elif isinstance(reward, LoadedReward) and reward.mode == "together":
        runner().run(_score_together(reward, items, calls))
        clear_alarm()
    else:
        for index, item in enumerate(items):
            service.set_deadline(limit_s)
            try:
                result = reward.score_one(item)
            except BaseException as error:  # boundary: the user's function, KeyboardInterrupt included
                result = failure_of(error)
            clear_alarm()
            _reply(calls, index, result)


async def _score_together(reward: LoadedReward, items: list[Item], calls: Calls) -> None:
    async def one(index: int, item: Item) -> None:
        try:
            result = await reward.score_async(item)
        except BaseException as error:  # boundary: the user's function, KeyboardInterrupt included
            result = failure_of(error)
        _reply(calls, index, result)

    await asyncio.gather(*(one(index, item) for index, item in enumerate(items)))


def _reply(calls: Calls, index: int, result: dict[str, Any]) -> None:
    try:
        calls.reply(index=index, result=result)
    except ReplyTooLong as error:
        calls.reply(index=index, result=_too_long(error))


def _too_long(error: ReplyTooLong) -> dict[str, str]:
    return {"error": f"the function's result is {error}"}
