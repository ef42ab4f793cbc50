"""Misbehaving reward functions against the real child process."""

import asyncio
import os
import subprocess
import sys

import pytest

from rollover.config import RewardsConfig
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.worker import RewardProbeError, RewardWorker
from rollover.types import Task
from unit.rewards.children import LIMIT, skipping

FUNCTIONS = """
import os, signal, sys, time

def good(prompts, completions, answer, **columns):
    return [float(c == a) for c, a in zip(completions, answer)]

def raises(prompts, completions, **columns):
    raise KeyError("no such thing")

def exits(prompts, completions, **columns):
    os._exit(3)

def sys_exits(prompts, completions, **columns):
    sys.exit(3)

def interrupts(prompts, completions, **columns):
    raise KeyboardInterrupt

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("an error in an error")

def mute(prompts, completions, **columns):
    raise Mute

def unprintable(prompts, completions, **columns):
    raise ValueError("half a pair \\ud800, an escape \\x1b[2J")

def prints(prompts, completions, **columns):
    print('{"results": "not these"}')
    os.system("echo noise")
    sys.stdout.flush()
    return [float(sys.stdin.read() == "")] * len(completions)

def alarm(prompts, completions, **columns):
    caught = []
    signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return [float(len(caught))] * len(completions)

def per_sample(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise ValueError("bad sample")
    if solution_str == "exit":
        os._exit(7)
    if solution_str == "loop":
        open("hangs", "w").close()
        time.sleep(1000)
    if solution_str == "pid":
        return os.getpid()
    return {"score": 1.0, "acc": 0.5}
"""


@pytest.fixture(autouse=True)
def shadow(folder):
    (folder / "json.py").write_text("raise RuntimeError('the standard library is shadowed')")


def task(name, **columns):
    return Task("t", "file", f"functions.py:{name}", prompt="2 + 2", columns={"answer": "4", **columns})


def score(*calls):
    """Rewards of each (name, completions) call on one worker, and its counters."""

    async def run():
        worker = RewardWorker(RewardsConfig(**LIMIT))
        try:
            rewards = [await worker.score([ScoreRequest(task(name), c) for c in texts]) for name, texts in calls]
            return rewards, worker.stats()
        finally:
            await worker.close()

    return skipping(run())


def counts(**of_kind):
    """All of a worker's counters."""
    names = ("timeouts", "crashes", "errors", "out_of_memory", "quarantined", "retries")
    return {f"rewards/{name}": of_kind.get(name, 0) for name in names}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raises", "KeyError: 'no such thing'"),
        ("sys_exits", "SystemExit"),
        ("interrupts", "KeyboardInterrupt (functions.py:"),
        ("mute", "Mute (functions.py:"),
        ("unprintable", "ValueError: half a pair ?, an escape ?[2J (functions.py:"),
        ("missing", "no function 'missing'"),
    ],
)
def test_failure_is_missing_with_its_error(name, error):
    (failed, fine), stats = score((name, ["4", "5"]), ("good", ["4", "5"]))
    assert all(r.missing and error in r.error for r in failed)
    assert [r.score for r in fine] == [1, 0]
    assert stats == counts(errors=2)


def test_a_dead_worker_is_missing_and_replaced():
    (failed, fine), stats = score(("exits", ["4", "5"]), ("good", ["4", "5"]))
    assert all(r.missing and "exit code 3" in r.error for r in failed)
    assert [r.score for r in fine] == [1, 0]
    assert stats["rewards/crashes"] == 1


def test_printing_and_reading_do_not_touch_the_protocol():
    (rewards, again), _ = score(("prints", ["4", "5"]), ("prints", ["4"]))
    assert [r.score for r in rewards + again] == [1, 1, 1]


def test_a_function_may_use_alarms():
    (rewards, pids), _ = score(("alarm", ["4"]), ("per_sample", ["pid"]))
    assert rewards[0].score == 1 and pids[0].score


def test_a_per_sample_failure_leaves_the_others_valid():
    texts = ["a", "raise", "b", "exit", "c", "loop", "d"]
    (rewards,), stats = score(("per_sample", texts))
    assert [r.score for r in rewards] == [1, None, 1, None, 1, None, 1]
    assert rewards[0].extras == {"acc": 0.5}
    errors = [r.error for r in rewards if r.missing]
    assert "bad sample" in errors[0] and "exit code 7" in errors[1] and errors[2] == "timeout after 100 s"
    assert stats == counts(timeouts=1, crashes=1, errors=1)


def test_rewards_of_several_specs_keep_the_request_order():
    async def run():
        worker = RewardWorker()
        await worker.probe(task("good"))
        names = ["good", "per_sample", "good", "per_sample"]
        requests = [ScoreRequest(task(n), c) for n, c in zip(names, ["4", "raise", "5", "x"], strict=True)]
        rewards = await asyncio.gather(worker.score(requests), worker.score(requests[:1]))
        await worker.close()
        return rewards

    mixed, one = asyncio.run(run())
    assert [r.score for r in mixed] == [1, None, 0, 1] and [r.score for r in one] == [1]


def test_a_module_of_the_base_directory_and_a_large_request(folder):
    async def run():
        worker = RewardWorker(base_dir=folder)
        one = Task("t", "file", "functions:good", prompt="p" * 100_000, columns={"answer": "4"})
        rewards = await worker.score([ScoreRequest(one, "4")] * 20)
        await worker.close()
        return rewards

    os.chdir("/")
    assert [r.score for r in asyncio.run(run())] == [1] * 20


@pytest.mark.parametrize(("name", "error"), [("raises", "KeyError"), ("god", "did you mean good")])
def test_the_probe_names_the_function_and_the_fault(name, error):
    async def run():
        worker = RewardWorker(RewardsConfig(**LIMIT))
        try:
            with pytest.raises(RewardProbeError, match=error) as caught:
                await worker.probe(task(name))
            assert f"functions.py:{name}" in str(caught.value)
            assert not any(worker.stats().values())
        finally:
            await worker.close()

    skipping(run())


def test_the_worker_imports_nothing_heavy():
    code = "import sys, rollover.rewards.child; print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
