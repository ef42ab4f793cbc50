"""What hosts ranks must do, whoever starts their processes; how ranks meet, how long they are waited for, and what
their answers amount to.

backend.py ──verb, values of each rank──▶ Ranks ──▶ the ranks' processes (process.py)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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


class Collecting:
    """The answers of `ranks` to one call, as they come. `timeout_s`, `limited`: as of `Ranks.call`. `lost(rank, how)`
    ends all ranks, and gives what there is to raise."""

    def __init__(
        self, ranks: Iterable[int], timeout_s: float, limited: bool, lost: Callable[[int, str], BackendLost]
    ) -> None:
        self._waiting, self._timeout_s, self._limited, self._lost = set(ranks), timeout_s, limited, lost
        self._answers: Answers = {}
        self._failures: list[Failure] = []
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
        if (failure := Failure.in_answer(rank, answer)) is None:
            self._answers[rank] = answer["found"]
        elif failure.error is not None:
            self._failures.append(failure)
        else:
            raise self._lost(rank, f"failed ({failure.said})")
        if self._failures:
            self._deadline = time.monotonic() + min(self._timeout_s, _SAME_S)
        elif self._limited:
            self._deadline = time.monotonic() + self._timeout_s

    def late(self) -> None:
        """No answer came within `left_s`. BackendLost where that means a loss."""
        if not self._failures:
            raise self._lost(min(self._waiting), f"did not answer within {self._timeout_s:g} s")
        self._given_up = True

    def found(self) -> Answers:
        """All answers. Raises what all refused, or one: then all are ended, as the others are in another state."""
        if not self._failures:
            return self._answers
        first = self._failures[0]
        assert first.error is not None
        if self._waiting or self._answers:
            self._lost(first.rank, f"failed ({first.said})")
        raise first.error
