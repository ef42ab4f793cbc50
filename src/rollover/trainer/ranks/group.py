"""What hosts ranks must do, whoever starts their processes; and how ranks meet and what their answers amount to.

backend.py ──verb, values of each rank──▶ Ranks ──▶ the ranks' processes (process.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollover.functions import FunctionError
from rollover.trainer.ranks import process

Answers = dict[int, dict[str, Any]]
"""rank -> what it found."""


class Ranks(Protocol):
    """Processes, one a rank, that are called together. The local ones: local.py.

    A rank that ends, or does not answer in time, ends all others at once, also between two calls.
    """

    num: int

    def call(self, verb: str, values: Mapping[int, Mapping[str, Any]], *, limited: bool = True) -> Answers:
        """Call these ranks at the same time; `values`, with arrays (wire.py), of each of them. `limited`: when one has
        answered, the others must within a time limit.

        BackendLost where one of them is gone, then or before. ValueError where all refuse what was asked for, OSError
        where they could not write it.
        """
        ...

    def close(self) -> None:
        """End them. Nothing happens the second time."""
        ...


@dataclass(frozen=True)
class Meeting:
    """Where and how ranks meet. `host`: an address of rank 0's machine, at which it listens for the others. `devices`:
    of each rank. `threads`: that each computes with. `timeout_s`: the longest that one waits for another."""

    host: str
    devices: list[str]
    threads: int
    timeout_s: float


def meet(ranks: Ranks, meeting: Meeting) -> None:
    """Make one process group of the ranks. Errors as of `Ranks.call`."""
    port = ranks.call("listen", {0: {"host": meeting.host}})[0]["port"]
    common = {"host": meeting.host, "port": port, "threads": meeting.threads, "timeout_s": meeting.timeout_s}
    places = {
        rank: common | {"rank": rank, "num_ranks": ranks.num, "device": meeting.devices[rank]}
        for rank in range(ranks.num)
    }
    ranks.call("join", places)


@dataclass(frozen=True)
class Failure:
    """What a rank raised. `said`: in words for whoever called. `error`: what to raise where all ranks refuse alike;
    None where nobody foresaw it."""

    rank: int
    said: str
    error: Exception | None

    @classmethod
    def in_answer(cls, rank: int, answer: Mapping[str, Any]) -> Failure | None:
        """None where the answer is no error."""
        if "error" not in answer:
            return None
        said = answer["error"]
        error: Exception | None = None
        match answer["kind"]:
            case process.VALUE:
                error = ValueError(said)
            case process.FUNCTION:
                error = FunctionError(said)
            case process.DISK:
                error = OSError(answer["errno"], said)
        return cls(rank, said, error)
