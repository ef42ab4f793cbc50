"""Ranks: processes that are called together, how they meet, and what their answers amount to.

    backend.py ──verb, values of each rank──▶ Ranks ──▶ the ranks' processes (process.py)

`LocalRanks` are processes of this machine; they end with this process and with each other.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rollover.functions import FunctionError
from rollover.processes import child_environment
from rollover.trainer.backend import BackendLost
from rollover.trainer.ranks import process
from rollover.workers.log_file import LogFile
from rollover.workers.worker import Reply, Worker, WorkerLimits

Answers = dict[int, dict[str, Any]]
"""rank -> what it found."""
_SAME_S = 30.0  # in which all refuse what one of them refuses; if they do not, they wait for that one


class Ranks(Protocol):
    """Processes, one a rank, that are called together. The local ones: LocalRanks.

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


def rendezvous(ranks: Ranks, host: str, devices: list[str], threads: int, timeout_s: float) -> None:
    """Make one process group of the ranks. Errors as of `Ranks.call`.

    `host`: an address of rank 0's machine, at which it listens for the others. `devices`: of each rank. `threads`: that
    each computes with. `timeout_s`: the longest that one waits for another.
    """
    port = ranks.call("listen", {0: {"host": host}})[0]["port"]
    common = {"host": host, "port": port, "threads": threads, "timeout_s": timeout_s, "num_ranks": ranks.num}
    ranks.call("join", {rank: common | {"rank": rank, "device": device} for rank, device in enumerate(devices)})


def _error_of(answer: Mapping[str, Any]) -> Exception | None:
    """What to raise where all ranks give this answer, an error; None where nobody foresaw it."""
    said, kind = answer["error"], answer["kind"]
    if kind == process.DISK:
        return OSError(answer["errno"], said)
    known = {process.VALUE: ValueError, process.FUNCTION: FunctionError}
    return known[kind](said) if kind in known else None


class AnswerCollector:
    """The answers of `ranks` to one call, as they come. `timeout_s`, `limited`: as of `Ranks.call`. `lost(rank, how)`
    ends all ranks, and gives what there is to raise."""

    def __init__(
        self, ranks: Iterable[int], timeout_s: float, limited: bool, lost: Callable[[int, str], BackendLost]
    ) -> None:
        self._pending, self._timeout_s, self._limited, self._lost = set(ranks), timeout_s, limited, lost
        self._answers: Answers = {}
        self._refused: tuple[int, str, Exception] | None = None  # the first: its rank, words and error
        self._deadline: float | None = None
        self._timed_out = False

    @property
    def done(self) -> bool:
        """Nobody is waited for any more."""
        return self._timed_out or not self._pending

    @property
    def remaining_s(self) -> float | None:
        """How long to wait for the next answer; None: as long as it takes."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def add(self, rank: int, answer: Mapping[str, Any]) -> None:
        """The answer of a rank, as process.py gives it. BackendLost for an error that nobody foresaw."""
        self._pending.discard(rank)
        if "error" not in answer:
            self._answers[rank] = answer["found"]
        elif (error := _error_of(answer)) is None:
            raise self._lost(rank, f"failed ({answer['error']})")
        else:
            self._refused = self._refused or (rank, answer["error"], error)
        if self._refused:
            self._deadline = time.monotonic() + min(self._timeout_s, _SAME_S)
        elif self._limited:
            self._deadline = time.monotonic() + self._timeout_s

    def on_timeout(self) -> None:
        """No answer came within `remaining_s`. BackendLost where that means a loss."""
        if not self._refused:
            raise self._lost(min(self._pending), f"did not answer within {self._timeout_s:g} s")
        self._timed_out = True

    def result(self) -> Answers:
        """All answers. Raises what all refused, or one: then all are ended, as the others are in another state."""
        if not self._refused:
            return self._answers
        rank, said, error = self._refused
        if self._pending or self._answers:
            self._lost(rank, f"failed ({said})")
        raise error


HOST = "127.0.0.1"
_END_S = 2.0
_NOTICED_S = 0.4


class LocalRanks:
    """See `Ranks`. Owns the processes.

    timeout_s: when one rank has answered a call that long ago, the others must have; and how long one may be stopped
    (SIGSTOP). environment: variables of the processes, unless this one has them. logs: the folder of their output
    (rank-0.log); None: that of this process. host: an address of this machine, at which they meet. first: the number of
    the first of them, where others are elsewhere.

    Start it in a thread that lives as long as they shall (`Worker`).
    """

    def __init__(
        self,
        num: int,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        logs: Path | None = None,
        *,
        host: str = HOST,
        first: int = 0,
    ) -> None:
        self.num, self._timeout_s = num, timeout_s
        self._logs = [None if logs is None else LogFile(logs / f"rank-{first + rank}.log") for rank in range(num)]
        self._calling, self._ending = threading.Lock(), threading.Lock()
        self._why = ""  # no call is possible any more
        self._first_ended: Worker | None = None  # by itself
        self._has_ended = threading.Event()
        self._workers: list[Worker] = []
        try:
            for rank in range(num):
                worker = Worker(
                    f"rank {rank}",
                    "rollover.trainer.ranks.process",
                    host,
                    environment=child_environment(**(environment or {})),
                    stderr=self._logs[rank],
                    limits=WorkerLimits(stopped_s=timeout_s),
                    on_end=self._on_end,
                )
                self._workers.append(worker)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def call(self, verb: str, values: Mapping[int, Mapping[str, Any]], *, limited: bool = True) -> Answers:
        with self._calling:
            if self._why:
                raise BackendLost(self._why)
            replies: queue.SimpleQueue[tuple[int, Reply]] = queue.SimpleQueue()
            for rank, of_rank in values.items():
                self._workers[rank].submit(
                    {"verb": verb, "values": of_rank}, lambda reply, rank=rank: replies.put((rank, reply)) is None
                )
            collecting = AnswerCollector(
                values, self._timeout_s, limited, lambda rank, how: self._lost(rank, verb, how)
            )
            while not collecting.done:
                try:
                    rank, reply = replies.get(timeout=collecting.remaining_s)
                except queue.Empty:
                    collecting.on_timeout()
                    continue
                if isinstance(reply, Exception):
                    raise self._lost(rank, verb)
                collecting.add(rank, reply)
            return collecting.result()

    def close(self) -> None:
        with self._ending:
            self._why = self._why or "the ranks were ended"
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.close(_END_S)

    # Private

    def _on_end(self, ended: Worker) -> None:
        """A rank that ends takes the others with it, also between two calls."""
        with self._ending:
            if self._first_ended is None and not self._why:
                self._first_ended = ended
                self._has_ended.set()
        for worker in self._workers:
            worker.kill()

    def _lost(self, rank: int, verb: str, how: str = "") -> BackendLost:
        """End all; the exception to raise."""
        # Another rank may notice the end of one, and report it, before this process does.
        self._has_ended.wait(_NOTICED_S if how else _END_S)
        with self._ending:
            ended = self._first_ended
            if ended is not None:
                rank, code = self._workers.index(ended), ended.exit_code
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                if ended.stopped_s >= self._timeout_s:
                    how = f"was stopped, and did not go on within {self._timeout_s:g} s"
            others = f": the other {self.num - 1} were ended" if self.num > 1 else ""
            log = self._logs[rank]
            self._why = f"rank {rank} of {self.num} {how or 'closed its connection'} (in {verb}){others}" + (
                f" ({log.path})" if log else ""
            )
        for worker in self._workers:
            worker.kill()
        return BackendLost(self._why)
