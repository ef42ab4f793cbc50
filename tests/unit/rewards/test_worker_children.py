"""What a reward function starts ends with its worker and with the trainer, wherever it has gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rollover.config import RewardsConfig
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.worker import RewardWorker
from rollover.types import Reward, Task
from unit.rewards.children import LIMIT, alive, skipping, wait_until_dead

FUNCTIONS = """
import os, signal, subprocess, sys, time

def daemon(write):
    "The way of daemons: an orphan in a session of its own."
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            os.closerange(0, 100)
            time.sleep(1000)
        os._exit(0)

def start(how):
    if how == "child":
        return subprocess.Popen(["sleep", "1000"]).pid
    if how == "session":
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
    read, write = os.pipe()
    daemon(write)
    return int(os.read(read, 20))

def one(solution_str):
    word, _, rest = solution_str.partition(" ")
    if word == "pid":
        return os.getpid()
    if word == "exit":
        os._exit(3)
    if word == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "group":
        os.killpg(0, signal.SIGKILL)
    if word == "sleep":
        open("hangs", "w").close()
        time.sleep(1000)
    return start(word)
"""
WAYS = ["child", "session", "daemon"]
pytestmark = pytest.mark.usefixtures("folder")


def requests_of(*texts):
    return [ScoreRequest(Task("t", "file", "functions.py:one", prompt="2 + 2"), text) for text in texts]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("close", None),
        ("exit", "exit code 3"),
        ("segfault", "killed by SIGSEGV"),
        ("group", "killed by SIGKILL"),
        ("sleep", "timeout after 100 s"),
    ],
)
def test_it_ends_with_its_worker_however_that_ends(end, error):
    async def run():
        worker = RewardWorker(RewardsConfig(**LIMIT))
        try:
            rewards = await worker.score(requests_of("pid", *WAYS))
            pids = [int(r.score or 0) for r in rewards]
            assert all(map(alive, pids))
            if end != "close":
                (ended,) = await worker.score(requests_of(end))
                assert ended.missing and error in ended.error
                assert wait_until_dead(pids)
        finally:
            await worker.close()
        return pids

    assert wait_until_dead(skipping(run()))


def test_a_worker_whose_keeper_was_killed_dies_and_is_replaced():
    async def run():
        worker = RewardWorker(RewardsConfig(**LIMIT))
        try:
            (reward,) = await worker.score(requests_of("pid"))
            pid = int(reward.score or 0)
            os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
            assert wait_until_dead([pid])
            await worker.score(requests_of("pid"))
            (again,) = await worker.score(requests_of("pid"))
            assert again.score and again.score != pid
        finally:
            await worker.close()

    asyncio.run(run())


PARENT = """
import asyncio
from rollover.config import RewardsConfig
from rollover.rewards.worker import RewardWorker
from rollover.rewards.protocol import ScoreRequest
from rollover.types import Task

async def main():
    worker = RewardWorker(RewardsConfig())
    task = Task("t", "s", "functions.py:one", prompt="p")
    rewards = await worker.score([ScoreRequest(task, text) for text in ("pid", "child", "session", "daemon")])
    print(*(int(r.score) for r in rewards), flush=True)
    await worker.score([ScoreRequest(task, "sleep")])

asyncio.run(main())
"""


def test_it_ends_with_a_trainer_that_is_killed():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 4 and all(map(alive, pids))
        parent.send_signal(signal.SIGKILL)
    assert wait_until_dead(pids)


def test_close_waits_for_a_kill_by_a_cancelled_call() -> None:
    """As where a run is stopped in the middle of a call: its event loop ends right after."""
    worker = RewardWorker(RewardsConfig.model_validate({"timeout_s": 1000.0}))

    async def stop() -> bool:
        others = psutil.Process().children()
        call = asyncio.ensure_future(worker.score(requests_of("sleep")))
        while not os.path.exists("hangs"):
            await asyncio.sleep(0.01)
        (keeper,) = (child for child in psutil.Process().children() if child not in others)
        call.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        await worker.close()
        return keeper.is_running()  # also where nobody has reaped it

    assert not asyncio.run(stop())


def test_a_worker_that_is_stopped_while_it_loads_is_replaced(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By its keeper, within seconds: the limit of a load is long, as imports may be slow."""
    (folder / "stops.py").write_text(
        "import os, signal\nif not os.path.exists('once'):\n    open('once', 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "def f(completions, **_): return [1.0] * len(completions)\n"
    )

    async def run() -> tuple[list[Reward], dict[str, float]]:
        worker = RewardWorker(RewardsConfig.model_validate({"retries": 1, "startup_timeout_s": 1000.0}))
        try:
            rewards = await worker.score([ScoreRequest(Task("t", "s", "stops.py:f", prompt="p"), "a")])
            return rewards, worker.stats()
        finally:
            await worker.close()

    (reward,), stats = asyncio.run(asyncio.wait_for(run(), 100))
    assert reward.score == 1 and (stats["rewards/crashes"], stats["rewards/retries"]) == (1, 1)
    assert "was stopped (SIGSTOP) and does not continue: killed" in capfd.readouterr().err
