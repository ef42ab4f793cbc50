"""The main function of a rank's process: it answers calls until its parent ends.

{"verb", "values"}  ──▶  Rank  ──▶  {"found"} or {"error", "kind"}
"""

from __future__ import annotations

import ipaddress
import os
import sys
import traceback
from typing import Any

from rollover.functions import FunctionError
from rollover.models.allocator import keep_few_shapes, keep_freed_memory
from rollover.workers.child import Calls

VALUE, FUNCTION, DISK, OTHER = "value", "function", "disk", "other"
"""Kinds of errors: what was asked for cannot be; a function of the user's own failed; a disk did; anything else."""


def main(host: str) -> None:
    """`host`: the address at which the ranks meet."""
    calls = Calls()
    prepare(host)
    keep_freed_memory()
    keep_few_shapes()

    from rollover.trainer.ranks.rank import Rank

    rank = Rank()
    for call in calls:
        calls.reply(**answer(rank, call["verb"], call["values"]))
    os._exit(0)  # threads of the process group may wait for others that have ended, too


def prepare(host: str) -> None:
    """Before torch is loaded. Ranks that meet at a loopback address talk to each other there alone."""
    if ipaddress.ip_address(host).is_loopback:
        interface = "lo" if sys.platform == "linux" else "lo0"
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def answer(rank: Any, verb: str, values: dict[str, Any]) -> dict[str, Any]:
    """The reply to a call: {"found"}, or an error as `error_answer` gives it."""
    try:
        return {"found": rank.answer(verb, values)}
    except Exception as error:  # boundary: it is raised in the loop's process
        failed = error_answer(error)
        if failed["kind"] == OTHER:
            traceback.print_exc()
        return failed


def error_answer(error: Exception) -> dict[str, Any]:
    """How an error is answered: {"error", "kind"}, and of a disk {"errno"}."""
    if isinstance(error, ValueError):
        return {"error": str(error), "kind": FUNCTION if isinstance(error, FunctionError) else VALUE}
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError | TimeoutError):
        return {"error": error.strerror, "kind": DISK, "errno": error.errno}
    return {"error": f"{type(error).__name__}: {error}", "kind": OTHER}
