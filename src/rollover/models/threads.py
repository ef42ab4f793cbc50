"""The threads that a decode step or a micro-batch is computed with: torch's and the compiled kernels' alike.

Owns torch's number of threads while a piece of work lasts (each thread that calls torch has its own), and the clock for
models/thread_tuner.py. Which share of the cores engine and trainer have is decided elsewhere (run/pipeline.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from rollover.config import Config, RunConfig
from rollover.models.allocator import keep_few_shapes, keep_freed_memory
from rollover.models.thread_tuner import ThreadTuner
from rollover.system import cores

Result = TypeVar("Result")


def most_threads(config: Config) -> int:
    """run.threads; with auto or 0 one for each core that this process may use."""
    threads = config.run.threads
    return threads if isinstance(threads, int) and threads else cores()


def prepare_process(config: Config) -> None:
    """For a process that computes: torch has all threads that it may have, and freed memory is kept for the next
    tensor, and what oneDNN keeps is bounded."""
    keep_freed_memory()
    keep_few_shapes()
    torch.set_num_threads(most_threads(config))


class Team:
    """As many threads as torch has now, or as `use` says; with `auto` at most so many: those that are fastest.

    `seconds`: of all pieces of work so far; `thread_seconds`: of each times its threads.
    """

    def __init__(self, *, auto: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self._auto, self._clock = auto, clock
        self._sizes: dict[int, ThreadTuner] = {}  # by limit: what else runs is another thing under each
        self._size = self._under(torch.get_num_threads())
        self._limit: Callable[[], int] | None = None
        self.seconds = self.thread_seconds = 0.0

    @classmethod
    def of(cls, run: RunConfig, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Team:
        """As run.threads says. For what another device computes the number is not looked for."""
        return cls(auto=run.threads == "auto" and device.type == "cpu", clock=clock)

    def _under(self, limit: int) -> ThreadTuner | None:
        return self._sizes.setdefault(limit, ThreadTuner(limit)) if self._auto else None

    def use(self, limit: int) -> None:
        """From now on so many threads (with auto: at most) for what the calling thread computes."""
        self._size = self._under(limit)
        torch.set_num_threads(limit if self._size is None else self._size.num)

    def assemble(self) -> None:
        """The calling thread computes with the number of the next piece: for what is not timed."""
        if self._limit is not None:
            self.use(self._limit())
        if self._size is not None and self._size.num != torch.get_num_threads():
            torch.set_num_threads(self._size.num)

    def compute(self, limit: Callable[[], int], work: Callable[[], Result]) -> Result:
        """`work`, by the calling thread, under that limit, which is asked for before each piece."""
        self._limit = limit
        try:
            self.use(limit())
            return work()
        finally:
            self._limit = None

    @contextmanager
    def piece(self, work: float) -> Iterator[None]:
        """Computes and times one piece. `work`: its size, in a unit that time grows with. A failure is not timed."""
        self.assemble()
        size = self._size
        num, started = torch.get_num_threads(), self._clock()
        yield
        seconds = self._clock() - started
        self.seconds += seconds
        self.thread_seconds += num * seconds
        if size is not None:
            size.took(seconds, work)
