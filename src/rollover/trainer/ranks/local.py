"""Ranks in processes of this machine. They end with this process, and with each other.

Owns the processes and the sockets to them. Start it in a thread that lives as long as they shall: on Linux they end
with it.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollover.engine.process.wire import Channel
from rollover.engine.remote.server_log import ServerLog
from rollover.process_tree import is_stopped
from rollover.processes import child_command, child_environment
from rollover.trainer.backend import BackendLost
from rollover.trainer.ranks import wire
from rollover.trainer.ranks.group import Answers, Collecting

HOST = "127.0.0.1"
_POLL_S = 0.2
_LOOKS_AT_LOGS = 50  # one after so many
_END_S = 2.0


class LocalRanks:
    """See `Ranks`. `timeout_s`: when one rank has answered a call that long ago, the others must have. `environment`:
    variables of the processes, unless this one has them. `logs`: the folder of what they print (rank-0.log); None: they
    print where this process does. `host`: an address of this machine, at which they meet. `first`: what the first of
    them is called there, where others are elsewhere."""

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
        self._logs = [] if logs is None else [ServerLog(logs / f"rank-{first + rank}.log") for rank in range(num)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._calling = threading.Lock()
        self._why = ""  # nothing can be asked any more
        self._ended: tuple[int, int] | None = None  # the first rank that ended by itself, and how
        self._stopped = [0] * num  # looks in a row at which it was stopped: what stops us, too, counts as one
        self._closing = threading.Event()
        for rank in range(num):
            ours, theirs = socket.socketpair()
            command = child_command("rollover.trainer.ranks.process", theirs.fileno())
            with self._logs[rank].open() if self._logs else contextlib.nullcontext() as log:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stderr=log,
                        pass_fds=[theirs.fileno()],
                        env=child_environment(**(environment or {})),
                        start_new_session=True,  # Ctrl-C is for the loop
                    )
                )
            theirs.close()
            self._channels.append(Channel(ours))
            with contextlib.suppress(ConnectionError):  # the first call says how it ended
                self._channels[-1].send({"host": host})
        threading.Thread(target=self._watch, daemon=True, name="ranks").start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def call(self, verb: str, values: Mapping[int, Mapping[str, Any]], *, limited: bool = True) -> Answers:
        with self._calling:
            if self._why:
                raise BackendLost(self._why)
            for rank, of_rank in values.items():
                try:
                    wire.send(self._channels[rank], {"verb": verb, "values": of_rank}, self._timeout_s)
                except (ConnectionError, TimeoutError):
                    raise self._lost(rank, verb) from None
            return self._answers(verb, values, limited)

    def close(self) -> None:
        self._closing.set()
        with self._calling:
            self._why = self._why or "the ranks were ended"
            for channel in self._channels:
                channel.close()
            deadline = time.monotonic() + _END_S
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
            self._kill()

    # Private

    def _answers(self, verb: str, ranks: Iterable[int], limited: bool) -> Answers:
        collecting = Collecting(ranks, self._timeout_s, limited, lambda rank, how: self._lost(rank, verb, how))
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(self._channels[rank], selectors.EVENT_READ, rank)
            while not collecting.done:
                ready = selector.select(collecting.left_s)
                if not ready:
                    collecting.late()
                for key, _ in ready:
                    try:
                        answer = wire.receive(self._channels[key.data], self._timeout_s)
                    except (ConnectionError, TimeoutError):
                        raise self._lost(key.data, verb) from None
                    selector.unregister(key.fileobj)
                    collecting.take(key.data, answer)
        return collecting.found()

    def _lost(self, rank: int, verb: str, how: str = "") -> BackendLost:
        """End all; what there is to raise."""
        deadline = time.monotonic() + (2 * _POLL_S if how else _END_S)
        while self._ended is None and time.monotonic() < deadline:
            # That a rank ended is noticed by the others, and may be told by them first.
            self._look()
            time.sleep(_POLL_S / 10)
        if self._ended is not None:
            rank, code = self._ended
            ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            frozen = self._stopped[rank] * _POLL_S >= self._timeout_s
            how = f"was stopped, and did not go on within {self._timeout_s:g} s" if frozen else ended
        self._kill()
        others = f": the other {self.num - 1} were ended" if self.num > 1 else ""
        log = f" ({self._logs[rank].path})" if self._logs else ""
        self._why = f"rank {rank} of {self.num} {how or 'closed its connection'} (in {verb}){others}{log}"
        return BackendLost(self._why)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _watch(self) -> None:
        """Between two calls, too, one that ends takes the others with it."""
        looks = 0
        while not self._closing.wait(_POLL_S):
            self._look()
            looks += 1
            if looks % _LOOKS_AT_LOGS == 0:
                for log in self._logs:
                    log.bound()
            if self._ended is not None:
                for process in self._processes:
                    process.kill()
                return
            self._end_stopped()

    def _end_stopped(self) -> None:
        """What was stopped for too long is killed: where all were, or the others wait for nothing, nobody would tell.
        On other systems than Linux it is not known."""
        for rank, process in enumerate(self._processes):
            if process.returncode is not None:
                continue
            self._stopped[rank] = self._stopped[rank] + 1 if is_stopped(process.pid) else 0
            if self._stopped[rank] * _POLL_S >= self._timeout_s:
                process.kill()
                return

    def _look(self) -> None:
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code is not None and self._ended is None and not self._why:
                self._ended = rank, code
