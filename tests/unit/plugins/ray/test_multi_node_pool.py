"""Scorings over several nodes that are lost and come back: each has its rewards once, the oldest first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import virtual_time
from heard import hear
from rollover.config import RewardsConfig
from rollover.plugins.ray.controller import ActorFailed
from rollover.plugins.ray.multi_node_pool import MultiNodePool
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.registry import Mode
from rollover.rewards.worker import RewardProbeError
from rollover.types import Reward, Task


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
