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
from rollover.workers.worker import LogFile, Reply, Worker, WorkerLimits

Answers = dict[int, dict[str, Any]]
"""rank -> its result."""
_SAME_S = 30.0  # time limit for all to refuse a call that one refused; otherwise they wait for that one


class Ranks(Protocol):
    """Processes, one per rank, that are called together (on this machine: LocalRanks).

    A rank that ends, or does not answer in time, ends all others at once, also between two calls.
    """

    num: int

    def call(self, verb: str, values: Mapping[int, Mapping[str, Any]], *, limited: bool = True) -> Answers:
        """Call these ranks at the same time with their `values`, arrays included (wire.py).

        `limited`: after the first answer the others must come within a time limit. BackendLost if a rank failed, now or
        before. ValueError if all ranks refuse the call, OSError if they could not write.
        """
        ...

    def close(self) -> None:
        """End the processes. Idempotent."""
        ...


def rendezvous(ranks: Ranks, host: str, devices: list[str], threads: int, timeout_s: float) -> None:
    """Connect the ranks to one process group. Errors as in `Ranks.call`.

    `host`: an address of rank 0's machine, at which it listens for the others. `devices`: of each rank. `threads`: of
    each rank. `timeout_s`: longest wait of a rank for another.
    """
    port = ranks.call("listen", {0: {"host": host}})[0]["port"]
    common = {"host": host, "port": port, "threads": threads, "timeout_s": timeout_s, "num_ranks": ranks.num}
    ranks.call("join", {rank: common | {"rank": rank, "device": device} for rank, device in enumerate(devices)})


def _error_of(answer: Mapping[str, Any]) -> Exception | None:
    """Return the exception for an answer that reports an expected error; None for an unexpected one."""
    said, kind = answer["error"], answer["kind"]
    if kind == process.DISK:
        return OSError(answer["errno"], said)
    known = {process.VALUE: ValueError, process.FUNCTION: FunctionError}
    return known[kind](said) if kind in known else None


class AnswerCollector:
    """Collects the answers of `ranks` to one call. `timeout_s`, `limited`: see `Ranks.call`.

    `lost(rank, how)` ends all ranks, and returns the exception to raise.
    """

    def __init__(
        self, ranks: Iterable[int], timeout_s: float, limited: bool, lost: Callable[[int, str], BackendLost]
    ) -> None:
        self._pending, self._timeout_s, self._limited, self._lost = set(ranks), timeout_s, limited, lost
        self._answers: Answers = {}
        self._refused: tuple[int, str, Exception] | None = None  # the first: its rank, message and error
        self._deadline: float | None = None
        self._timed_out = False

    @property
    def done(self) -> bool:
        """Whether no answer is pending."""
        return self._timed_out or not self._pending

    @property
    def remaining_s(self) -> float | None:
        """Time limit for the next answer; None: no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def add(self, rank: int, answer: Mapping[str, Any]) -> None:
        """Add the answer of a rank (process.py). BackendLost for an unexpected error."""
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
        """Handle a wait of `remaining_s` without an answer. BackendLost, unless a rank refused."""
        if not self._refused:
            raise self._lost(min(self._pending), f"did not answer within {self._timeout_s:g} s")
        self._timed_out = True

    def result(self) -> Answers:
        """Return all answers, or raise the refusal.

        If only some ranks refused, all are ended: their states differ.
        """
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
    """Ranks in child processes of this machine.

    timeout_s: time limit of the other ranks after the first answer to a call, and of a stop (SIGSTOP). environment:
    variables of the processes, unless this process has them. logs: the folder of their output (rank-0.log); None:
    inherited. host: the address of this machine for the rendezvous. first: number of the first rank, if others are
    elsewhere.

    Start it in a thread that lives as long as the ranks (`Worker`).
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
        self._why = ""  # set: no call is possible any more
        self._first_ended: Worker | None = None  # not ended by this process
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
            worker.disconnect()
        for worker in self._workers:
            worker.close(_END_S)

    # Private

    def _on_end(self, ended: Worker) -> None:
        """End all ranks when one ends, also between two calls."""
        with self._ending:
            if self._first_ended is None and not self._why:
                self._first_ended = ended
                self._has_ended.set()
        for worker in self._workers:
            worker.kill()

    def _lost(self, rank: int, verb: str, how: str = "") -> BackendLost:
        """End all ranks; return the exception to raise."""
        # Another rank may notice the end of one, and report it, before this process does.
        self._has_ended.wait(_NOTICED_S if how else _END_S)
        with self._ending:
            ended = self._first_ended
            if ended is not None:
                rank, code = self._workers.index(ended), ended.exit_code
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                if ended.stopped_s >= self._timeout_s:
                    how = f"was stopped, and did not continue within {self._timeout_s:g} s"
            others = f": the other {self.num - 1} were ended" if self.num > 1 else ""
            log = self._logs[rank]
            self._why = f"rank {rank} of {self.num} {how or 'closed its connection'} (in {verb}){others}" + (
                f" ({log.path})" if log else ""
            )
        for worker in self._workers:
            worker.kill()
        return BackendLost(self._why)
