"""The reward worker: `python -m rollover.rewards.worker PARENT_PID BASE_DIR`. Runs reward functions, one at a time.

Owns the child's end of the protocol (JSON lines, never pickle) and the rule that it dies with its parent. Functions run
in the main thread, so they may use signal.alarm. It never limits time: the parent kills it.

    in   {"op": "load", "spec"}                    out  {"loaded": true, "per_sample": bool} | {"failed": text}
    in   {"op": "score", "spec", "items": [...]}   out  one line each, {"result": {...}}, if per_sample,
                                                        else {"results": [...]} | {"failed": text}
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from typing import Any, TextIO

from rollover.rewards.registry import Item, LoadedReward, load_reward

_PR_SET_PDEATHSIG = 1
_POLL_PARENT_S = 0.5
_MAX_ERROR_CHARS = 2000


def main() -> None:
    parent, base_dir = int(sys.argv[1]), sys.argv[2]
    _die_with(parent)
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
    loaded: dict[str, LoadedReward] = {}

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    for line in requests:
        request = json.loads(line)
        spec = request["spec"]
        if request["op"] == "load":
            try:
                loaded[spec] = load_reward(spec, base_dir)
            except ValueError as error:
                reply({"failed": str(error)[:_MAX_ERROR_CHARS]})
            else:
                reply({"loaded": True, "per_sample": loaded[spec].per_sample})
        elif loaded[spec].per_sample:
            for item in request["items"]:
                reply({"result": _score_one(loaded[spec], item)})
        else:
            reply(_score_all(loaded[spec], request["items"]))


def _score_one(reward: LoadedReward, item: Item) -> dict[str, Any]:
    try:
        return reward.score_one(item)
    except (Exception, SystemExit) as error:  # boundary: the user's function
        return {"error": _describe(error)}
    finally:
        _clear_alarm()


def _score_all(reward: LoadedReward, items: list[Item]) -> dict[str, Any]:
    try:
        return {"results": reward.score_all(items)}
    except (Exception, SystemExit) as error:  # boundary: the user's function
        return {"failed": _describe(error)}
    finally:
        _clear_alarm()


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]


def _clear_alarm() -> None:
    """An alarm that a function left pending would kill a later call."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _die_with(parent: int) -> None:
    """SIGKILL when the parent dies: by the kernel on Linux, and by a thread that watches getppid everywhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_PARENT_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
