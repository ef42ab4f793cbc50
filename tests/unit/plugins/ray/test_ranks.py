"""Ranks in actors: called together, refused together, lost together."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rollover.config import Config
from rollover.plugins.ray.controller import ActorFailed, ActorRanks
from rollover.trainer.backend import BackendLost
from rollover.trainer.ranks.process import VALUE

LIMIT_S = 30


class FakeRank:
    """Answers a call by `answer(verb, values)`; after `kill` every call, pending ones too, raises ActorFailed. `begin`
    takes so long as its function."""

    def __init__(self, answer: Callable[[str, Any], dict[str, Any]], begin: Callable[[float], None]) -> None:
        self.answer_, self.resident, self.rank_lives, self.begin = answer, 0, True, begin
        self.dead = threading.Event()

    def kill(self) -> None:
        self.dead.set()

    def call(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        if self.dead.is_set():
            raise ActorFailed("it was killed")
        if method == "rank_memory":
            return 1000 if self.rank_lives else 0
        if method == "begin":
            assert limit_s is not None
            self.begin(limit_s)
        if method != "call":
            return None
        found = self.answer_(*arguments)
        if "hangs" in found:
            self.dead.wait(LIMIT_S)
            raise ActorFailed("it was killed")
        return found

    async def call_async(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        raise NotImplementedError

    async def ping(self) -> None:
        raise NotImplementedError


class FakeActors:
    """`answers`: of each rank. `no_room`: so often no node has room."""

    def __init__(
        self,
        *answers: Callable[[str, Any], dict[str, Any]],
        no_room: int = 0,
        begin: Callable[[float], None] = lambda limit_s: None,
    ) -> None:
        backend = {"type": "ranks", "num_ranks": 2}
        self.config = Config.model_validate({"backend": backend, "engine": {"kind": "remote", "num_servers": 1}})
        self.answers, self.no_room, self.begin = answers, no_room, begin
        self.ranks: dict[str, FakeRank] = {}

    def start(self, name: str, role: type, *arguments: Any) -> FakeRank:
        if self.no_room:
            self.no_room -= 1
            raise ActorFailed("no node has room for it")
        self.ranks[name] = FakeRank(self.answers[int(name.split()[1])], self.begin)
        return self.ranks[name]

    def end(self, name: str) -> None:
        if name in self.ranks:
            self.ranks[name].kill()

    def address_of(self, name: str) -> str:
        return "127.0.0.1"

    def is_remote(self, name: str) -> bool:
        return False


def found(verb: str, values: Any) -> dict[str, Any]:
    return {"found": {verb: values}}


def refuses(verb: str, values: Any) -> dict[str, Any]:
    return {"error": "too long", "kind": VALUE}


def hangs(verb: str, values: Any) -> dict[str, Any]:
    return {"hangs": True}


def fails(verb: str, values: Any) -> dict[str, Any]:
    return {"error": "RuntimeError: what nobody foresaw", "kind": "other"}


def loses(verb: str, values: Any) -> dict[str, Any]:
    return {"lost": "rank 0 of 1 was killed by SIGKILL"}


def test_call_reaches_all_or_some_ranks() -> None:
    ranks = ActorRanks(FakeActors(found, found, no_room=1), 2, LIMIT_S)
    assert ranks.call("step", {0: {"a": 1}, 1: {"a": 2}}) == {0: {"step": {"a": 1}}, 1: {"step": {"a": 2}}}
    assert ranks.call("save", {1: {}}) == {1: {"save": {}}}
    ranks.close()
    ranks.close()
    with pytest.raises(BackendLost, match="the ranks were ended"):
        ranks.call("step", {0: {}, 1: {}})


def test_error_of_all_ranks_is_raised_and_ranks_continue() -> None:
    ranks = ActorRanks(FakeActors(refuses, refuses), 2, LIMIT_S)
    for _ in range(2):
        with pytest.raises(ValueError, match="too long"):
            ranks.call("step", {0: {}, 1: {}})
    ranks.close()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (hangs, "rank 1 of 2 did not answer within 0.3 s"),
        (fails, "rank 1 of 2 failed .RuntimeError: what nobody foresaw"),
        (loses, "rank 1 of 2 is lost: rank 0 of 1 was killed by SIGKILL"),
        (refuses, "too long"),
    ],
)
def test_failed_rank_ends_all_ranks(other: Callable[[str, Any], dict[str, Any]], said: str) -> None:
    actors = FakeActors(found, other)
    ranks = ActorRanks(actors, 2, 0.3)
    with pytest.raises((BackendLost, ValueError), match=said):
        ranks.call("step", {0: {}, 1: {}})
    assert all(rank.dead.is_set() for rank in actors.ranks.values())
    with pytest.raises(BackendLost):
        ranks.call("step", {0: {}, 1: {}})
    ranks.close()


@pytest.mark.parametrize("gone", [True, False], ids=["actor", "rank"])
def test_rank_that_ends_between_calls_ends_the_others(gone: bool) -> None:
    actors = FakeActors(found, found)
    ranks = ActorRanks(actors, 2, LIMIT_S)
    lost = actors.ranks["rank 0"]
    if gone:
        lost.kill()
    else:
        lost.rank_lives = False
    deadline = time.monotonic() + LIMIT_S
    while not actors.ranks["rank 1"].dead.is_set():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(BackendLost, match="rank 0 of 2 has ended .in between two calls."):
        ranks.call("step", {0: {}, 1: {}})
    ranks.close()


def test_no_room_within_timeout_loses_the_backend() -> None:
    with pytest.raises(BackendLost, match="rank 0 cannot be started: no node has room"):
        ActorRanks(FakeActors(found, found, no_room=10**6), 2, 0.1)


def test_ranks_start_concurrently_within_one_timeout() -> None:
    """What a process imports first may come from a disk that many read."""
    together, limits = threading.Barrier(2), []

    def begin(limit_s: float) -> None:
        limits.append(limit_s)
        together.wait(LIMIT_S)

    ActorRanks(FakeActors(found, found, begin=begin), 2, 1000.0).close()
    assert len(limits) == 2 and all(limit_s > 900 for limit_s in limits)


def test_failed_start_ends_the_other_starting_ranks() -> None:
    calls = itertools.count()

    def begin(limit_s: float) -> None:
        if next(calls) == 0:
            raise ValueError("it is refused")

    actors = FakeActors(found, found, begin=begin)
    with pytest.raises(ValueError, match="it is refused"):
        ActorRanks(actors, 2, LIMIT_S)
    assert all(rank.dead.is_set() for rank in actors.ranks.values())
