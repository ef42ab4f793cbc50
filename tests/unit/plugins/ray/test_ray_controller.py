"""The controller's side of roles on nodes, with actors in this process that can be lost: rewards come by them as text,
functions of a program travel or are refused in words, and a lost actor is told as a lost node or server."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rollover import live_objects
from rollover.config import Config
from rollover.engine.remote.client import ServerFailed
from rollover.http_guard import TOKEN_VARIABLE
from rollover.plugins.ray.controller import ActorFailed, ActorHost, ActorRewardNode
from rollover.plugins.ray.roles import request_of, request_to_json
from rollover.rewards.built_in import composite_spec
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.registry import TrainerState
from rollover.rewards.worker import RewardProbeError
from rollover.types import Reward, Task


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
