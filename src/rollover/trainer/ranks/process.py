"""What runs in the process of a rank: it reads calls, carries them out and answers, until its parent ends.

{"verb", "values"}  ──▶  Rank  ──▶  {"found"} or {"error", "kind"}
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import traceback
from typing import Any

from rollover.engine.process.wire import Channel
from rollover.functions import FunctionError
from rollover.models.allocator import keep_few_shapes, keep_freed_memory

VALUE, FUNCTION, DISK, OTHER = "value", "function", "disk", "other"
"""Kinds of errors: what was asked for cannot be; a function of the user's own failed; a disk did; anything else."""


def main(control_fd: str) -> None:
    """Serve the parent at the other end of this socket."""
    serve(Channel(socket.socket(fileno=int(control_fd))))


def prepare(host: str) -> None:
    """Before torch is loaded. Ranks that meet at a loopback address talk to each other there alone."""
    if ipaddress.ip_address(host).is_loopback:
        interface = "lo" if sys.platform == "linux" else "lo0"
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def serve(channel: Channel) -> None:
    """Answer until the other end is closed. The first message names the address at which the ranks meet."""
    prepare(channel.receive()["host"])
    os.dup2(2, 1)  # what a library prints is no output of a command

    keep_freed_memory()
    keep_few_shapes()

    from rollover.trainer.ranks import wire
    from rollover.trainer.ranks.rank import Rank

    rank = Rank()
    while True:
        try:
            call = wire.receive(channel)
        except ConnectionError:
            os._exit(0)  # threads of the process group may wait for others that have ended, too
        wire.send(channel, _answer(rank, call))


def _answer(rank: Any, call: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"found": rank.answer(call["verb"], call["values"])}
    except Exception as error:  # boundary: it is raised in the loop's process
        answer = error_answer(error)
        if answer["kind"] == OTHER:
            traceback.print_exc()
        return answer


def error_answer(error: Exception) -> dict[str, Any]:
    """How an error is answered: {"error", "kind"}, and of a disk {"errno"}."""
    if isinstance(error, ValueError):
        return {"error": str(error), "kind": FUNCTION if isinstance(error, FunctionError) else VALUE}
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError | TimeoutError):
        return {"error": error.strerror, "kind": DISK, "errno": error.errno}
    return {"error": f"{type(error).__name__}: {error}", "kind": OTHER}
