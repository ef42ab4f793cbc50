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
"""Kinds of errors: invalid call; a custom function failed; a disk failed; anything else."""


def main(host: str) -> None:
    """Answer calls until the parent ends. `host`: the address of the rendezvous."""
    calls = Calls()
    prepare(host)
    keep_freed_memory()
    keep_few_shapes()

    from rollover.trainer.ranks.rank import Rank

    rank = Rank()
    for call in calls:
        calls.reply(**answer(rank, call["verb"], call["values"]))
    os._exit(0)  # threads of the process group may wait for ranks that ended


def prepare(host: str) -> None:
    """Set environment variables, before torch is loaded: ranks at a loopback address use only that interface."""
    if ipaddress.ip_address(host).is_loopback:
        interface = "lo" if sys.platform == "linux" else "lo0"
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def answer(rank: Any, verb: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a call: {"found"}, or an error from `error_answer`."""
    try:
        return {"found": rank.answer(verb, values)}
    except Exception as error:  # boundary: it is raised in the loop's process
        failed = error_answer(error)
        if failed["kind"] == OTHER:
            traceback.print_exc()
        return failed


def error_answer(error: Exception) -> dict[str, Any]:
    """Encode an error: {"error", "kind"}, and "errno" for a disk error."""
    if isinstance(error, ValueError):
        return {"error": str(error), "kind": FUNCTION if isinstance(error, FunctionError) else VALUE}
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError | TimeoutError):
        return {"error": error.strerror, "kind": DISK, "errno": error.errno}
    return {"error": f"{type(error).__name__}: {error}", "kind": OTHER}
