"""Ray: controller, pools and ranks on several nodes, sessions, addresses."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import virtual_time
from heard import hear
from rollover import live_objects
from rollover.cluster.protocol import ClusterSetup, open_cluster
from rollover.config import Config, RewardsConfig
from rollover.engine.remote.client import ServerFailed
from rollover.http_guard import TOKEN_VARIABLE
from rollover.plugins.ray.controller import ActorFailed, ActorHost, ActorRanks, ActorRewardNode
from rollover.plugins.ray.multi_node_pool import MultiNodePool
from rollover.plugins.ray.roles import request_of, request_to_json
from rollover.process_tree import has_ended, resident_bytes
from rollover.processes import child_environment
from rollover.rewards.built_in import composite_spec
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.registry import Mode, TrainerState
from rollover.rewards.worker import RewardProbeError
from rollover.trainer.backend import BackendLost
from rollover.trainer.ranks.process import VALUE
from rollover.types import Reward, Task

# The controller's side of roles on nodes, with actors in this process that can be lost: rewards come by them as
# text, functions of a program travel or are refused in words, and a lost actor is told as a lost node or server


class FakeActor:
    """Answers by `answers` (method -> what it returns, or an error), and notes what it was asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.asked, self.resident = answers, [], 0

    def call(self, limit_s: float, method: str, *arguments: Any) -> Any:
        self.asked.append((method, *arguments))
        found = self.answers[method]
        if isinstance(found, Exception):
            raise found
        return found

    async def call_async(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        return self.call(limit_s or 0, method, *arguments)

    async def ping(self) -> None:
        await self.call_async(1, "ping")


class FakeActors:
    """Gives FakeActors; `elsewhere`: they are on another machine; `address`: of theirs. `started`: the names of roles,
    each time."""

    def __init__(self, answers: dict[str, Any], elsewhere: bool = False, address: str = "", **engine: Any) -> None:
        self.config = Config.model_validate({"engine": {"kind": "remote", "num_servers": 1, **engine}})
        self.answers, self.elsewhere = answers, elsewhere
        self.address = address or ("10.0.0.2" if elsewhere else "127.0.0.1")
        self.actors: list[FakeActor] = []
        self.started: list[tuple[str, tuple[Any, ...]]] = []
        self.ended: list[str] = []

    def start(self, name: str, role: type, *arguments: Any) -> FakeActor:
        if isinstance(self.answers.get("start"), Exception):
            raise self.answers["start"]
        self.started.append((name, arguments))
        self.actors.append(FakeActor(self.answers))
        return self.actors[-1]

    def end(self, name: str) -> None:
        self.ended.append(name)

    def address_of(self, name: str) -> str:
        return self.address

    def is_remote(self, name: str) -> bool:
        return self.elsewhere


def task(reward: str = "mine.py:reward") -> Task:
    return Task("t", "here", reward, messages=({"role": "user", "content": "2 + 2"},), columns={"answer": [4, "x"]})


def scored(*rewards: Reward, errors: int = 0) -> str:
    known = {"counters": {"rewards/errors": errors}, "modes": {"mine.py:reward": "each"}}
    return json.dumps({"rewards": [reward.to_json() for reward in rewards], **known})


@pytest.fixture
def held() -> Iterator[list[str]]:
    """Names of objects that a test hands over."""
    names: list[str] = []
    yield names
    for name in names:
        live_objects.release(name)


def test_request_and_reward_survive_json() -> None:
    request = ScoreRequest(task(), "four", (7, 8), trainer_state=TrainerState(4, 9, 1.0))
    assert request_of(json.loads(json.dumps(request_to_json(request)))) == request

    async def work() -> None:
        reward = Reward(0.5, {"format": 1.0}, None)
        actors = FakeActors({"num_workers": 3, "ping": None, "score": scored(reward, errors=2)})
        node = ActorRewardNode(actors, 0)
        await node.start()
        assert await node.score([request]) == [reward]
        assert (node.num_workers, node.counters, node.modes) == (3, {"rewards/errors": 2}, {"mine.py:reward": "each"})
        await node.start()
        assert node.counters == {}, "another pool counts from 0"

    asyncio.run(work())


def test_live_function_is_sent_once_or_refused_with_a_reason(held: list[str]) -> None:
    lock = threading.Lock()
    held.append(live_objects.hold(lambda completions, **_: [1.0 for _ in completions], "plain"))
    held.append(live_objects.hold(lambda completions, **_: [float(lock.locked())], "locked"))

    async def work() -> None:
        actors = FakeActors({"num_workers": 1, "ping": None, "score": scored(Reward(1.0)), "probe": scored()})
        node = ActorRewardNode(actors, 0)
        await node.start()
        for _ in range(2):
            await node.score([ScoreRequest(task(held[0]), "x")])
        first, second = (asked[2] for asked in actors.actors[0].asked if asked[0] == "score")
        assert set(first) == {held[0]} == set(first[held[0]]["functions"]) and second == {}
        several = composite_spec([{"function": held[0]}, {"function": "json"}])
        await node.score([ScoreRequest(task(several), "x")])
        assert set(actors.actors[0].asked[-1][2][several]["functions"]) == {held[0]}, "one of several"
        await node.score([ScoreRequest(task(held[1]), "x")])
        refused = actors.actors[0].asked[-1][2][held[1]]
        assert "lock" in refused["refused"] and "put the function into a file" in refused["refused"]

    asyncio.run(work())


def test_probe_error_is_raised_and_failed_actor_fails_node() -> None:
    async def work() -> None:
        answers: dict[str, Any] = {"num_workers": 1, "ping": None}
        node = ActorRewardNode(actors := FakeActors(answers), 0)
        with pytest.raises(ActorFailed):
            await node.score([ScoreRequest(task(), "x")])
        await node.start()
        answers["probe"] = json.dumps({"error": "it returns None", "counters": {}, "modes": {}})
        with pytest.raises(RewardProbeError, match="it returns None"):
            await node.probe(task())
        answers["score"] = answers["ping"] = ActorFailed("the actor died")
        for call in (node.score([ScoreRequest(task(), "x")]), node.ping(), node.start()):
            with pytest.raises(ActorFailed, match="the actor died"):
                await call
        answers["start"] = ActorFailed("no node has room for it")
        with pytest.raises(ActorFailed, match="no node has room"):
            await node.start()
        await node.discard()
        assert actors.ended == ["reward 0"]

    asyncio.run(work())


def test_discarded_server_restarts_on_request() -> None:
    async def work() -> None:
        answers: dict[str, Any] = {"url": {"url": "http://127.0.0.1:9"}, "ping": None, "end": None}
        host = ActorHost(actors := FakeActors(answers), 4)
        assert await asyncio.to_thread(host.address, 1.0) == "http://127.0.0.1:9"
        server = await host.ready()
        await server.close()
        await host.discard()
        answers["url"] = {"failed": "its process said no address"}
        with pytest.raises(ServerFailed, match="said no address"):
            await host.ready()
        await host.discard()
        answers["url"] = ActorFailed("the actor died")
        with pytest.raises(ServerFailed, match="the actor died"):
            await host.ready()
        assert [name for name, _ in actors.started] == ["server 4"] * 3
        await host.close()
        assert ("end",) in actors.actors[-1].asked and actors.ended[-1] == "server 4"

    pytest.importorskip("aiohttp")
    asyncio.run(work())


def test_server_start_is_retried_after_its_node_failed() -> None:
    async def work() -> None:
        answers: dict[str, Any] = {
            "start": ActorFailed("no node has room for it"),
            "url": {"url": "http://127.0.0.1:9"},
        }
        host = ActorHost(FakeActors(answers), 0)
        with pytest.raises(ServerFailed, match="no node has room"):
            await asyncio.to_thread(host.address, 1.0)
        with pytest.raises(ServerFailed, match="no node has room"):
            await host.ready()
        del answers["start"]
        assert await asyncio.to_thread(host.address, 1.0) == "http://127.0.0.1:9"

    asyncio.run(work())


def test_servers_on_other_machines_need_a_shared_folder() -> None:
    with pytest.raises(ValueError, match="engine.weights_dir is empty"):
        ActorHost(FakeActors({}, elsewhere=True), 0)
    ActorHost(actors := FakeActors({}, elsewhere=True, weights_dir="/shared"), 0)
    assert actors.started[0][1][-2] == "10.0.0.2"


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1"])
@pytest.mark.parametrize("before", ["", None, "given"])
def test_server_and_client_share_a_token(before: str | None, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On loopback too, where web pages could reach it. It goes to no other process of the run."""
    monkeypatch.setenv(TOKEN_VARIABLE, before or "")
    if before is None:
        monkeypatch.delenv(TOKEN_VARIABLE)
    environment = dict(os.environ)
    host = ActorHost(actors := FakeActors({}, address=address), 0)
    assert actors.started[0][1][-1] == host.token
    assert host.token == "given" if before == "given" else len(host.token) > 30
    assert dict(os.environ) == environment


# Scorings over several nodes that are lost and come back: each has its rewards once, the oldest first


def request(number: int) -> ScoreRequest:
    return ScoreRequest(Task(f"t{number}", "here", "mine.py:reward", prompt="?"), str(number))


class Node:
    """Scores a text by its length after `seconds`. `kill` ends it, and what it is at, until it is started again; with
    `may_start` False it cannot be."""

    def __init__(self, name: str, seconds: float = 1.0) -> None:
        self.name, self.seconds, self.num_workers = name, seconds, 1
        self.counters: dict[str, float] = {}
        self.modes: dict[str, Mode] = {}
        self.may_start, self.hangs, self.closed = True, False, False
        self.began: list[str] = []
        self.ended: list[str] = []
        self.starts = 0
        self._dead = asyncio.Event()
        self._dead.set()

    async def start(self) -> None:
        if not self.may_start:
            raise ActorFailed("it is down")
        self._dead = asyncio.Event()
        self.counters, self.hangs = {}, False
        self.starts += 1

    def kill(self) -> None:
        self._dead.set()

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        self.began.append(requests[0].completion)
        dead = self._dead
        try:
            await asyncio.wait_for(dead.wait(), self.seconds if not self.hangs else None)
        except TimeoutError:
            self.ended.append(requests[0].completion)
            self.counters = {"rewards/errors": self.counters.get("rewards/errors", 0) + 1}
            self.modes = {requests[0].task.reward: "each"}
            return [Reward(float(len(r.completion))) for r in requests]
        raise ActorFailed("it was killed")

    async def probe(self, task: Task) -> None:
        if task.task_id == "t13":
            raise RewardProbeError("no luck")
        await self.score([ScoreRequest(task, "")])

    async def ping(self) -> None:
        if self._dead.is_set() or self.hangs:
            raise ActorFailed("it does not answer")

    async def discard(self) -> None:
        self.kill()

    async def close(self) -> None:
        self.closed = True


def spread(*nodes: Node) -> MultiNodePool:
    return MultiNodePool(RewardsConfig.model_validate({}), nodes)


def play(work: Callable) -> None:
    async def whole() -> None:
        await work()

    virtual_time.run(whole())


def test_all_nodes_score_in_order_of_arrival() -> None:
    async def work() -> None:
        nodes = Node("a"), Node("b")
        pool = spread(*nodes)
        rewards = await asyncio.gather(*(pool.score([request(i)]) for i in range(6)))
        assert [len(r) for r in rewards] == [1] * 6
        assert [sorted(node.began) == node.began for node in nodes] == [True, True]
        assert [len(node.began) for node in nodes] == [3, 3]
        assert asyncio.get_running_loop().time() < 3.5
        await pool.close()
        assert all(node.closed for node in nodes)

    play(work)


def test_calls_of_a_failed_node_are_retried_first_and_count_once() -> None:
    async def work() -> None:
        nodes, said = (Node("a"), Node("b")), hear([])
        pool = spread(*nodes)
        scorings = [asyncio.ensure_future(pool.score([request(i)])) for i in range(6)]
        await asyncio.sleep(0.5)
        nodes[0].may_start = False
        [lost] = nodes[0].began
        nodes[0].kill()
        await asyncio.sleep(0.6)
        assert nodes[1].began[-1] == lost, "it is the oldest"
        await asyncio.gather(*scorings)
        assert sorted(nodes[0].ended + nodes[1].ended) == [str(i) for i in range(6)]
        stats = pool.stats()
        assert (stats["rewards/lost_nodes"], stats["rewards/lost_calls"], stats["rewards/nodes"]) == (1, 1, 1)
        assert stats["rewards/errors"] == 6 and stats["rewards/queue"] == stats["rewards/busy_workers"] == 0
        assert len(said) == 2 and "a is lost (it was killed)" in said[0] and "it is down" in said[1]
        await pool.close()

    play(work)


def test_calls_without_a_node_wait_for_one() -> None:
    async def work() -> None:
        node, said = Node("a"), hear([])
        pool = spread(node)
        assert not pool.is_stalled, "nothing was asked of it yet"
        await pool.score([request(0)])
        scoring = asyncio.ensure_future(pool.score([request(1)]))
        await asyncio.sleep(0.5)
        node.may_start = False
        node.kill()
        await asyncio.sleep(1000)
        assert not scoring.done() and pool.is_stalled
        assert pool.stats()["rewards/nodes"] == 0 and pool.stats()["rewards/queue"] == 1
        assert any("scorings wait" in line for line in said) and len(said) == 2, "told once, not at each try"
        node.may_start = True
        assert (await scoring)[0].score == 1 and not pool.is_stalled
        assert pool.stats()["rewards/errors"] == 2, "those of its first start, too"
        await pool.close()

    play(work)


def test_hanging_and_idle_nodes_are_pinged() -> None:
    async def work() -> None:
        nodes = Node("a"), Node("b")
        pool = spread(*nodes)
        await pool.score([request(0)])
        await asyncio.sleep(1)
        nodes[0].hangs = nodes[1].hangs = True
        scoring = asyncio.ensure_future(pool.score([request(1)]))
        await asyncio.sleep(30)
        assert scoring.done() and nodes[0].starts == nodes[1].starts == 2
        await pool.close()

    play(work)


def test_cancelled_call_frees_its_worker() -> None:
    async def work() -> None:
        node = Node("a")
        pool = spread(node)
        scorings = [asyncio.ensure_future(pool.score([request(i)])) for i in range(4)]
        await asyncio.sleep(0.5)
        scorings[0].cancel()
        scorings[1].cancel()
        await asyncio.wait(scorings)
        assert scorings[2].result() and scorings[3].result()
        assert node.ended == ["2", "3"] and pool.stats()["rewards/busy_workers"] == 0
        await pool.close()

    play(work)


def test_probe_and_modes_are_those_of_one_pool() -> None:
    async def work() -> None:
        pool = spread(Node("a"))
        task = request(0).task
        assert not pool.scores_singly(task)
        await pool.probe(task)
        assert pool.scores_singly(task) == pool.config.streaming
        with pytest.raises(RewardProbeError, match="no luck"):
            await pool.probe(request(13).task)
        await pool.close()

    play(work)


def test_impossible_node_fails_waiting_calls() -> None:
    class Refused(Node):
        async def start(self) -> None:
            raise ValueError("no such place")

    async def work() -> None:
        pool = spread(Refused("a"))
        for number in range(2):
            with pytest.raises(ValueError, match="no such place"):
                await asyncio.wait_for(pool.score([request(number)]), 60)
        await pool.close()

    play(work)


# Ranks in actors: called together, refused together, lost together


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


class FakeRanks:
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
    ranks = ActorRanks(FakeRanks(found, found, no_room=1), 2, LIMIT_S)
    assert ranks.call("step", {0: {"a": 1}, 1: {"a": 2}}) == {0: {"step": {"a": 1}}, 1: {"step": {"a": 2}}}
    assert ranks.call("save", {1: {}}) == {1: {"save": {}}}
    ranks.close()
    ranks.close()
    with pytest.raises(BackendLost, match="the ranks were ended"):
        ranks.call("step", {0: {}, 1: {}})


def test_error_of_all_ranks_is_raised_and_ranks_continue() -> None:
    ranks = ActorRanks(FakeRanks(refuses, refuses), 2, LIMIT_S)
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
    actors = FakeRanks(found, other)
    ranks = ActorRanks(actors, 2, 0.3)
    with pytest.raises((BackendLost, ValueError), match=said):
        ranks.call("step", {0: {}, 1: {}})
    assert all(rank.dead.is_set() for rank in actors.ranks.values())
    with pytest.raises(BackendLost):
        ranks.call("step", {0: {}, 1: {}})
    ranks.close()


@pytest.mark.parametrize("gone", [True, False], ids=["actor", "rank"])
def test_rank_that_ends_between_calls_ends_the_others(gone: bool) -> None:
    actors = FakeRanks(found, found)
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
        ActorRanks(FakeRanks(found, found, no_room=10**6), 2, 0.1)


def test_ranks_start_concurrently_within_one_timeout() -> None:
    """What a process imports first may come from a disk that many read."""
    together, limits = threading.Barrier(2), []

    def begin(limit_s: float) -> None:
        limits.append(limit_s)
        together.wait(LIMIT_S)

    ActorRanks(FakeRanks(found, found, begin=begin), 2, 1000.0).close()
    assert len(limits) == 2 and all(limit_s > 900 for limit_s in limits)


def test_failed_start_ends_the_other_starting_ranks() -> None:
    calls = itertools.count()

    def begin(limit_s: float) -> None:
        if next(calls) == 0:
            raise ValueError("it is refused")

    actors = FakeRanks(found, found, begin=begin)
    with pytest.raises(ValueError, match="it is refused"):
        ActorRanks(actors, 2, LIMIT_S)
    assert all(rank.dead.is_set() for rank in actors.ranks.values())


# What a driver started ends with it, also what has left its family, and its folder is removed


SESSION_LIMIT_S = 60

DRIVER = """
import subprocess, sys, time
from rollover.plugins.ray.session import start_cleanup
start_cleanup(sys.argv[1])
daemon = "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
daemon += " start_new_session=True).pid, flush=True); time.sleep(600)"
print(subprocess.Popen([sys.executable, "-c", daemon], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_cleanup_kills_descendants_of_a_killed_driver(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder)], stdout=subprocess.PIPE, text=True, env=child_environment()
    )
    assert driver.stdout is not None
    pids = [int(driver.stdout.readline()) for _ in range(2)]
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    orphan = subprocess.Popen([*sleep, f"--socket={folder}/raylet"])  # of no family: its parent has ended
    reader = subprocess.Popen([*sleep, f"{folder}/log"])
    cleanup = next(p for p in psutil.Process(driver.pid).children() if "rollover.plugins.ray.session" in p.cmdline())
    try:
        time.sleep(3)  # so that the cleanup has looked
        os.kill(cleanup.pid, signal.SIGTERM)
        assert not any(map(has_ended, pids)) and resident_bytes(driver.pid) > resident_bytes(pids[1]) > 10**6
        driver.kill()
        driver.wait()
        deadline = time.monotonic() + SESSION_LIMIT_S
        ended = [*pids, orphan.pid, cleanup.pid]
        while time.monotonic() < deadline and (folder.exists() or not all(map(has_ended, ended))):
            time.sleep(0.05)
        assert not folder.exists() and all(map(has_ended, ended))
        assert reader.poll() is None, "who reads what Ray wrote is not Ray's"
    finally:
        for process in (orphan, reader):
            process.kill()
            process.wait()
        for pid in pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)


# A cluster's address that nobody answers is told at once, not after the quarter of an hour that Ray asks for


def at(address: str) -> Config:
    return Config.model_validate({"cluster": {"type": "ray", "address": address}})


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
def test_address_without_listener_fails_at_once(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_gcs_server_port_wait_time_s"):
        monkeypatch.setenv(name, "1")  # what is set for Ray is gone after this test
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        address = f"{host}:{taken.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"cluster\.address = .*: no cluster answers there .*`ray start --head`"):
            open_cluster(ClusterSetup(at(address), None))
    assert time.monotonic() - began < 60
