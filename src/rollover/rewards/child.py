"""What runs in a reward worker's process: the reward functions (rewards/client.py is the parent's end).

Owns the child's end of the protocol (JSON lines; rewards/wire.py). A function that the program of the parent handed
over comes inside the message that loads it (rewards/travel.py). Functions run in the main thread, so they may use
signal.alarm. It never limits time: the parent kills it. Services are told how much there is.

    in   {"op": "load", "spec"}                    out  {"pid", "mode": "each" | "together" | "batch"} | a failure
    in   {"op": "score", "spec", "items": [...],
          "limit_s": of the call}                  out  each, together: a line for each item as it is scored,
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
import sys
from typing import TextIO

from rollover.processes import limit_memory
from rollover.rewards import service
from rollover.rewards.inside import Replies, clear_alarm, failure_of, private_pipes
from rollover.rewards.registry import Item, LoadedReward, runner
from rollover.rewards.several import LoadedSum, loaded
from rollover.rewards.travel import unpacked

_MAX_ERROR_CHARS = 2000


def main(base_dir: str, memory_bytes: str) -> None:
    """Serve on the standard input and output. `memory_bytes`: 0 is no limit."""
    limit_memory(int(memory_bytes))
    requests, replies = private_pipes()
    sys.path[:0] = [base_dir, os.getcwd()]
    serve(requests, replies, base_dir)


def serve(requests: TextIO, replies: Replies, base_dir: str) -> None:
    """Answer requests until the input ends."""
    rewards: dict[str, LoadedReward | LoadedSum] = {}
    own_pid = os.getpid()
    for line in requests:
        request = json.loads(line)
        spec, replies.call = request["spec"], request["call"]
        if request["op"] == "load":
            try:
                rewards[spec] = loaded(spec, base_dir, unpacked(request))
            except ValueError as error:
                replies.send({"pid": own_pid, "error": str(error)[:_MAX_ERROR_CHARS]})
            else:
                replies.send({"pid": own_pid, "mode": rewards[spec].mode})
        else:
            _score(rewards[spec], request["items"], replies, request["limit_s"])


def _score(reward: LoadedReward | LoadedSum, items: list[Item], replies: Replies, limit_s: float) -> None:
    """Score the items and reply. An alarm that a function left pending would kill a later call: it is cleared."""
    service.within(limit_s)
    if reward.mode == "batch":
        try:
            message = {"results": reward.score_all(items)}
        except BaseException as error:  # boundary: the user's function, KeyboardInterrupt included
            message = failure_of(error)
        clear_alarm()
        replies.send(message)
    elif isinstance(reward, LoadedReward) and reward.mode == "together":
        runner().run(_score_together(reward, items, replies))
        clear_alarm()
    else:
        for index, item in enumerate(items):
            service.within(limit_s)
            try:
                result = reward.score_one(item)
            except BaseException as error:  # boundary: the user's function, KeyboardInterrupt included
                result = failure_of(error)
            clear_alarm()
            replies.send({"index": index, "result": result})


async def _score_together(reward: LoadedReward, items: list[Item], replies: Replies) -> None:
    async def one(index: int, item: Item) -> None:
        try:
            result = await reward.score_async(item)
        except BaseException as error:  # boundary: the user's function, KeyboardInterrupt included
            result = failure_of(error)
        replies.send({"index": index, "result": result})

    await asyncio.gather(*(one(index, item) for index, item in enumerate(items)))
