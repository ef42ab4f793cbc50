"""The controller's side of ranks in actors: they are called together, and end together.

Batches and what is found of them go through the cluster's object store. Gradients go among the ranks, weights through
files. Owns the actors, and the thread that looks whether all of them live.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from rollover.plugins.ray.hosted import CALL_S, Actor, Actors, Gone, check_weights_dir
from rollover.plugins.ray.roles import RankRole
from rollover.trainer.backend import BackendLost
from rollover.trainer.ranks.group import AnswerCollector, Answers, rendezvous

_LOOK_EVERY_S = 0.5
_END_S = 5.0


def start_actor_ranks(actors: Actors, devices: list[str], threads: int) -> ActorRanks:
    """Ranks that have met. `threads`: of each. ValueError where weights could not come back; BackendLost where no node
    has room for one of them, after backend.rank_timeout_s."""
    timeout_s = actors.config.backend.rank_timeout_s
    ranks = ActorRanks(actors, len(devices), timeout_s)
    try:
        rendezvous(ranks, ranks.host, devices, threads, timeout_s)
    except BaseException:
        ranks.close()
        raise
    return ranks


class ActorRanks:
    """See `Ranks`. `timeout_s`: when one rank has answered a call that long ago, the others must have; and how long
    nodes with room for all of them are waited for."""

    def __init__(self, actors: Actors, num: int, timeout_s: float) -> None:
        self.num, self._actors, self._timeout_s = num, actors, timeout_s
        self._calling, self._ending = threading.Lock(), threading.Lock()
        self._why = ""  # nothing can be asked any more
        self._closing = threading.Event()
        self._threads = ThreadPoolExecutor(num, "rank-call")
        deadline = time.monotonic() + timeout_s
        try:
            self._ranks: list[Actor] = list(self._threads.map(lambda rank: self._started(rank, deadline), range(num)))
        except BaseException as error:
            self._end(str(error))
            self._threads.shutdown()
            for rank in range(num):  # that were started meanwhile
                actors.end(_name(rank))
            raise
        self.host = actors.address_of(_name(0))
        threading.Thread(target=self._watch, daemon=True, name="ranks").start()

    def call(self, verb: str, values: Mapping[int, Mapping[str, Any]], *, limited: bool = True) -> Answers:
        with self._calling:
            if self._why:
                raise BackendLost(self._why)
            calls = {
                self._threads.submit(self._ranks[rank].ask, None, "call", verb, of_rank): rank
                for rank, of_rank in values.items()
            }
            return self._answers(verb, calls, limited)

    def close(self) -> None:
        self._closing.set()
        if not self._why:
            ends = [self._threads.submit(rank.ask, _END_S, "end") for rank in self._ranks]
            wait(ends)
        self._end("the ranks were ended")
        self._threads.shutdown(wait=False)

    # Private

    def _started(self, rank: int, deadline: float) -> Actor:
        config, name = self._actors.config, _name(rank)
        while not self._why:  # another one cannot be started
            try:
                check_weights_dir(self._actors, name, "ranks are on other machines than the controller")
                actor = self._actors.start(name, RankRole, config, rank, self._actors.address_of(name))
                # What a process imports first may take long, where many read one disk.
                actor.ask(max(CALL_S, deadline - time.monotonic()), "begin")
                return actor
            except Gone as error:
                if time.monotonic() > deadline:
                    raise BackendLost(f"{name} cannot be started: {error}") from error
            time.sleep(_LOOK_EVERY_S)
        raise BackendLost(self._why)

    def _answers(self, verb: str, calls: dict[Future[dict[str, Any]], int], limited: bool) -> Answers:
        collecting = AnswerCollector(
            calls.values(), self._timeout_s, limited, lambda rank, how: self._lost(rank, verb, how)
        )
        waiting = set(calls)
        while not collecting.done:
            done, waiting = wait(waiting, collecting.remaining_s, FIRST_COMPLETED)
            if not done:
                collecting.on_timeout()
            for call in done:
                rank = calls[call]
                try:
                    answer = call.result()
                except Gone as error:
                    raise self._lost(rank, verb, f"is gone: {error}") from None
                if "lost" in answer:
                    raise self._lost(rank, verb, f"is lost: {answer['lost']}")
                collecting.add(rank, answer)
        return collecting.result()

    def _lost(self, rank: int, verb: str, how: str) -> BackendLost:
        """End all; what there is to raise."""
        self._end(f"rank {rank} of {self.num} {how} (in {verb}): the others were ended")
        return BackendLost(self._why)

    def _end(self, why: str) -> None:
        with self._ending:
            if not self._why:
                self._why = why
                for rank in range(self.num):
                    self._actors.end(_name(rank))

    def _watch(self) -> None:
        """Between two calls, too, one that ends takes the others with it."""
        while not self._closing.wait(_LOOK_EVERY_S) and not self._why:
            for rank, actor in enumerate(self._ranks):
                found = 0
                with contextlib.suppress(Gone):
                    found = actor.ask(CALL_S, "lives")
                if not found and not self._closing.is_set():
                    self._lost(rank, "between two calls", "has ended")
                    return
                actor.resident = found


def _name(rank: int) -> str:
    return f"rank {rank}"
