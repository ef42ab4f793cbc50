"""What hosts ranks must do, whoever starts their processes; how ranks meet, how long they are waited for, and what
their answers amount to.

backend.py ──verb, values of each rank──▶ Ranks ──▶ the ranks' processes (process.py)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from rollover.functions import FunctionError
from rollover.trainer.backend import BackendLost
from rollover.trainer.ranks import process

Answers = dict[int, dict[str, Any]]
"""rank -> what it found."""
_SAME_S = 30.0  # in which all refuse what one of them refuses; if they do not, they wait for that one


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


def meet(ranks: Ranks, host: str, devices: list[str], threads: int, timeout_s: float) -> None:
    """Make one process group of the ranks. Errors as of `Ranks.call`.

    `host`: an address of rank 0's machine, at which it listens for the others. `devices`: of each rank. `threads`: that
    each computes with. `timeout_s`: the longest that one waits for another.
    """
    port = ranks.call("listen", {0: {"host": host}})[0]["port"]
    common = {"host": host, "port": port, "threads": threads, "timeout_s": timeout_s, "num_ranks": ranks.num}
    ranks.call("join", {rank: common | {"rank": rank, "device": device} for rank, device in enumerate(devices)})


def _refusal(answer: Mapping[str, Any]) -> Exception | None:
    """What to raise where all ranks give this answer, an error; None where nobody foresaw it."""
    said, kind = answer["error"], answer["kind"]
    if kind == process.DISK:
        return OSError(answer["errno"], said)
    known = {process.VALUE: ValueError, process.FUNCTION: FunctionError}
    return known[kind](said) if kind in known else None


class Collecting:
    """The answers of `ranks` to one call, as they come. `timeout_s`, `limited`: as of `Ranks.call`. `lost(rank, how)`
    ends all ranks, and gives what there is to raise."""

    def __init__(
        self, ranks: Iterable[int], timeout_s: float, limited: bool, lost: Callable[[int, str], BackendLost]
    ) -> None:
        self._waiting, self._timeout_s, self._limited, self._lost = set(ranks), timeout_s, limited, lost
        self._answers: Answers = {}
        self._refused: tuple[int, str, Exception] | None = None  # the first: its rank, words and error
        self._deadline: float | None = None
        self._given_up = False

    @property
    def done(self) -> bool:
        """Nobody is waited for any more."""
        return self._given_up or not self._waiting

    @property
    def left_s(self) -> float | None:
        """How long to wait for the next answer; None: as long as it takes."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def take(self, rank: int, answer: Mapping[str, Any]) -> None:
        """The answer of a rank, as process.py gives it. BackendLost for an error that nobody foresaw."""
        self._waiting.discard(rank)
        if "error" not in answer:
            self._answers[rank] = answer["found"]
        elif (error := _refusal(answer)) is None:
            raise self._lost(rank, f"failed ({answer['error']})")
        else:
            self._refused = self._refused or (rank, answer["error"], error)
        if self._refused:
            self._deadline = time.monotonic() + min(self._timeout_s, _SAME_S)
        elif self._limited:
            self._deadline = time.monotonic() + self._timeout_s

    def late(self) -> None:
        """No answer came within `left_s`. BackendLost where that means a loss."""
        if not self._refused:
            raise self._lost(min(self._waiting), f"did not answer within {self._timeout_s:g} s")
        self._given_up = True

    def found(self) -> Answers:
        """All answers. Raises what all refused, or one: then all are ended, as the others are in another state."""
        if not self._refused:
            return self._answers
        rank, said, error = self._refused
        if self._waiting or self._answers:
            self._lost(rank, f"failed ({said})")
        raise error
