"""One child process: its calls and replies, its ends, limits, and what dies with it."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollover.process_tree import has_ended
from rollover.processes import child_environment
from rollover.workers.framing import BadMessage
from rollover.workers.worker import LogFile, Reply, Worker, WorkerDied, WorkerLimits

TESTS = Path(__file__).parents[2]
LIMIT_S = 60.0  # of a machine with other things to do
MAX_BYTES = 1 << 20

Make = Callable[..., Worker]


@pytest.fixture
def make() -> Iterator[Make]:
    workers: list[Worker] = []

    def made(**options: Any) -> Worker:
        path = os.pathsep.join(filter(None, [str(TESTS), child_environment().get("PYTHONPATH", "")]))
        environment = child_environment() | {"PYTHONPATH": path}
        options = {"environment": environment, "limits": WorkerLimits(MAX_BYTES)} | options
        workers.append(Worker("the child", "unit.workers.child", MAX_BYTES, **options))
        return workers[-1]

    yield made
    for worker in workers:
        worker.close()


def reply_to(worker: Worker, **message: Any) -> Reply:
    """The one reply to a call, from a thread without an event loop."""
    replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    worker.submit(message, lambda reply: replies.put(reply) is None)
    return replies.get(timeout=LIMIT_S)


def value_of(worker: Worker, key: str, **message: Any) -> Any:
    reply = reply_to(worker, **message)
    assert isinstance(reply, dict), reply
    return reply[key]


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_pending_calls_get_their_own_replies(make: Make) -> None:
    worker = make()
    replies: queue.SimpleQueue[tuple[int, Reply]] = queue.SimpleQueue()
    for number in range(20):
        message = {"do": "echo", "values": np.full((number, 2), number, np.float32)}
        worker.submit(message, lambda reply, number=number: replies.put((number, reply)) is None)
    for expected in range(20):
        number, reply = replies.get(timeout=LIMIT_S)
        assert number == expected and isinstance(reply, dict)
        assert reply["values"].shape == (number, 2) and (reply["values"] == number).all()
    assert not worker.num_pending


def test_a_call_has_several_replies_until_they_are_taken(make: Make) -> None:
    async def run() -> tuple[list[int], dict[str, Any]]:
        worker, seen = make(), []

        def take(reply: dict[str, Any]) -> bool:
            seen.append(reply["number"])
            return len(seen) == 5

        await worker.request({"do": "count", "to": 5}, take, LIMIT_S, limit_each=True)
        return seen, await worker.request({"do": "echo", "text": "next"}, limit_s=LIMIT_S)

    assert asyncio.run(run()) == ([0, 1, 2, 3, 4], {"do": "echo", "text": "next"})


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("do", "how"), [("exit", "exit code 3"), ("kill", "killed by SIGKILL")])
def test_a_death_fails_all_pending_calls_and_later_ones(make: Make, do: str, how: str, kept: bool) -> None:
    ends: list[Worker] = []
    worker = make(kept=kept, on_end=ends.append)
    first, second = reply_to(worker, do=do), reply_to(worker, do="echo")
    for reply in (first, second):
        assert isinstance(reply, WorkerDied) and str(reply) == f"the child died in this call ({how})"
    assert worker.wait(LIMIT_S) and ends == [worker] and not worker.alive


def test_the_end_between_two_calls_is_noticed(make: Make) -> None:
    ends: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    worker = make(on_end=ends.put)
    os.kill(value_of(worker, "pid", do="pid"), signal.SIGKILL)
    assert ends.get(timeout=LIMIT_S) is worker and worker.exit_code == -signal.SIGKILL


@pytest.mark.parametrize("do", ["hang", "half"])
def test_a_call_that_hangs_raises_after_its_limit(make: Make, do: str) -> None:
    """Also in the midst of a message."""

    async def run() -> Worker:
        worker = make(kept=True)
        await worker.request({"do": "pid"}, limit_s=LIMIT_S)
        with pytest.raises(TimeoutError):
            await worker.request({"do": do, "fd": 3}, limit_s=0.2)
        await worker.killed()
        return worker

    assert not asyncio.run(run()).alive


def test_the_reply_to_a_cancelled_call_is_ignored(make: Make) -> None:
    async def run() -> dict[str, Any]:
        worker = make()
        await worker.request({"do": "pid"}, limit_s=LIMIT_S)
        asking = asyncio.ensure_future(worker.request({"do": "later"}))
        await asyncio.sleep(0)
        asking.cancel()
        return await worker.request({"do": "echo", "text": "next"}, limit_s=LIMIT_S)

    assert asyncio.run(run())["text"] == "next"


def test_an_object_that_looks_like_an_array_arrives(make: Make) -> None:
    assert value_of(make(), "column", do="echo", column={"array:": []}) == {"array:": []}


@pytest.mark.parametrize("place", [[1e308, 1e308], [10**26], ["x"]])
def test_an_array_that_cannot_be_made_ends_the_child(make: Make, place: list[Any]) -> None:
    worker = make()
    reply = reply_to(worker, do="forged", place=["<f4", place])
    assert isinstance(reply, BadMessage) and worker.wait(LIMIT_S) and not worker.alive


def test_replies_that_came_during_a_stall_of_the_loop_count(make: Make) -> None:
    async def run() -> dict[str, Any]:
        worker = make()
        await worker.request({"do": "pid"}, limit_s=LIMIT_S)
        asking = asyncio.ensure_future(worker.request({"do": "echo", "text": "early"}, limit_s=0.3))
        await asyncio.sleep(0)
        time.sleep(1.0)
        return await asking

    assert asyncio.run(run())["text"] == "early"


def test_a_stopped_child_is_killed_after_its_limit(make: Make) -> None:
    worker = make(limits=WorkerLimits(MAX_BYTES, 0.5))
    assert isinstance(reply_to(worker, do="stop"), WorkerDied)
    assert worker.stopped_s >= 0.5 and worker.exit_code == -signal.SIGKILL


@pytest.mark.parametrize("fd", [3, 4])
def test_bytes_that_are_no_message_end_the_child(make: Make, fd: int) -> None:
    """Its connection is one of these."""
    worker = make()
    reply = reply_to(worker, do="garbage", fd=fd)
    assert isinstance(reply, BadMessage | WorkerDied)
    assert isinstance(reply_to(worker, do="echo"), BadMessage | WorkerDied) and worker.wait(LIMIT_S)


def test_a_second_reply_to_a_call_ends_the_child(make: Make) -> None:
    worker = make()
    assert reply_to(worker, do="twice") == {"first": True}
    reply = reply_to(worker, do="hang")
    assert isinstance(reply, BadMessage) and str(reply) == "answered another call"


def test_a_reply_that_is_too_long_is_not_sent(make: Make) -> None:
    worker = make()
    assert value_of(worker, "error", do="large", chars=3 * MAX_BYTES) == "3 MiB long, above 1 MiB"
    assert value_of(worker, "text", do="large", chars=MAX_BYTES // 2) == "x" * (MAX_BYTES // 2)


def test_prints_go_to_the_log_and_the_input_is_empty(make: Make, tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "child.log")
    worker = make(stderr=log)
    assert reply_to(worker, do="print") == {}
    worker.close(LIMIT_S)
    assert sorted(log.last_words().splitlines()) == ["''", "printed"]


def test_a_kept_child_takes_what_it_started_with_it(make: Make) -> None:
    worker = make(kept=True)
    pids = [value_of(worker, "pid", do=do) for do in ("pid", "start")]
    worker.kill()
    assert worker.wait(LIMIT_S)
    until(lambda: all(map(has_ended, pids)))


def test_closing_lets_a_child_end_by_itself(make: Make) -> None:
    worker = make()
    assert value_of(worker, "pid", do="pid") == worker.pid
    worker.close(LIMIT_S)
    assert worker.exit_code == 0


def test_a_message_that_cannot_be_sent_costs_nothing(make: Make) -> None:
    worker = make()
    with pytest.raises(TypeError, match="a set cannot be sent"):
        worker.submit({"values": {1}}, lambda reply: True)
    assert reply_to(worker, do="echo") == {"do": "echo"}


PARENT = """
import queue, sys, time
from rollover.workers.worker import Worker
worker, replies = Worker("the child", "unit.workers.child", 1 << 20, kept=sys.argv[1] == "kept"), queue.SimpleQueue()
for do in ("pid", "start") if sys.argv[1] == "kept" else ("pid",):
    worker.submit({"do": do}, lambda reply: replies.put(reply) is None)
    print(replies.get()["pid"], flush=True)
print(worker.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("kept", [False, True])
def test_children_die_with_their_parent(kept: bool) -> None:
    path = os.pathsep.join(filter(None, [str(TESTS), child_environment().get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", PARENT, "kept" if kept else "bound"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(3 if kept else 2)]
        parent.kill()
        until(lambda: all(map(has_ended, pids)))
