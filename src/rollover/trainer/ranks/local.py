"""Ranks in processes of this machine. They end with this process, and with each other."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollover.processes import child_environment
from rollover.trainer.backend import BackendLost
from rollover.trainer.ranks.group import Answers, Collecting
from rollover.workers.log_file import LogFile
from rollover.workers.worker import Reply, Worker, WorkerLimits

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
            collecting = Collecting(values, self._timeout_s, limited, lambda rank, how: self._lost(rank, verb, how))
            while not collecting.done:
                try:
                    rank, reply = replies.get(timeout=collecting.left_s)
                except queue.Empty:
                    collecting.late()
                    continue
                if isinstance(reply, Exception):
                    raise self._lost(rank, verb)
                collecting.take(rank, reply)
            return collecting.found()

    def close(self) -> None:
        with self._ending:
            self._why = self._why or "the ranks were ended"
        for worker in self._workers:
            worker.disconnect()
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
