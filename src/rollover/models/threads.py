"""The threads of a decode step or a micro-batch: torch's and the compiled kernels' alike.

Owns torch's number of threads during a piece of work (each thread that calls torch has its own), and the clock for
models/thread_tuner.py. run/pipeline.py divides the cores between engine and trainer.
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
    """Return run.threads; for auto or 0 one per usable core."""
    threads = config.run.threads
    return threads if isinstance(threads, int) and threads else cores()


def prepare_process(config: Config) -> None:
    """Prepare a process that computes: threads, freed memory, and oneDNN's cache."""
    keep_freed_memory()
    keep_few_shapes()
    torch.set_num_threads(most_threads(config))


class Team:
    """The number of threads of torch: as it is now, or as `use` sets it; with `auto` at most that, tuned for speed.

    `seconds`: of all pieces of work so far; `thread_seconds`: of each times its threads.
    """

    def __init__(self, *, auto: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self._auto, self._clock = auto, clock
        self._sizes: dict[int, ThreadTuner] = {}  # by limit: other programs differ under each
        self._size = self._under(torch.get_num_threads())
        self._limit: Callable[[], int] | None = None
        self.seconds = self.thread_seconds = 0.0

    @classmethod
    def from_config(cls, run: RunConfig, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Team:
        """Configure by run.threads. For other devices than a CPU the number is not tuned."""
        return cls(auto=run.threads == "auto" and device.type == "cpu", clock=clock)

    def _under(self, limit: int) -> ThreadTuner | None:
        return self._sizes.setdefault(limit, ThreadTuner(limit)) if self._auto else None

    def use(self, limit: int) -> None:
        """Use this many threads (with auto: at most) in the calling thread from now on."""
        self._size = self._under(limit)
        torch.set_num_threads(limit if self._size is None else self._size.num)

    def assemble(self) -> None:
        """Set the number of threads of the next piece, for untimed work of the calling thread."""
        if self._limit is not None:
            self.use(self._limit())
        if self._size is not None and self._size.num != torch.get_num_threads():
            torch.set_num_threads(self._size.num)

    def compute(self, limit: Callable[[], int], work: Callable[[], Result]) -> Result:
        """Run `work` in the calling thread under `limit`, which is called before each piece."""
        self._limit = limit
        try:
            self.use(limit())
            return work()
        finally:
            self._limit = None

    @contextmanager
    def piece(self, work: float) -> Iterator[None]:
        """Compute and time one piece. `work`: its size, proportional to its time. A failure is not timed."""
        self.assemble()
        size = self._size
        num, started = torch.get_num_threads(), self._clock()
        yield
        seconds = self._clock() - started
        self.seconds += seconds
        self.thread_seconds += num * seconds
        if size is not None:
            size.took(seconds, work)
