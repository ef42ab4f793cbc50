"""The reward pool with its real child processes: who scores what, tries, quarantine, memory, async functions."""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager

import psutil
import pytest

from rollover.config import RewardsConfig
from rollover.rewards.pool import RewardPool
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.worker import RewardProbeError, RewardWorker
from rollover.types import Task
from unit.rewards.children import LIMIT, alive, skipping

FUNCTIONS = """
import asyncio, os, signal, time
from pathlib import Path

hoard, running, loops = [], 0, set()

def times_called(name):
    with open(name, "a") as file:
        file.write("x")
    return len(Path(name).read_text())

def hang():
    Path("hangs").touch()
    time.sleep(1000)

def one(solution_str):
    word, _, rest = solution_str.partition(" ")
    if word == "pid":
        return os.getpid()
    if word == "wait":  # until the file is there
        while not os.path.exists(rest):
            time.sleep(0.005)
    if word == "mark":
        Path(rest).touch()
    if word == "sleep":
        time.sleep(float(rest))
    if word == "hang":
        hang()
    if word == "exit":
        os._exit(3)
    if word == "flaky" and times_called(rest) == 1:
        os._exit(4)
    if word == "slow_once" and times_called(rest) == 1:
        hang()
    if word == "raise" and times_called(rest):
        raise KeyError("no such thing")
    if word == "count":
        return times_called(rest)
    if word == "memory":
        return len(bytearray(4 << 30))
    if word == "alarm":
        signal.alarm(1)  # left pending
    if word == "hoard":
        hoard.append(bytearray(200_000_000))
        return len(hoard)
    return len(solution_str)

def batch(completions, **columns):
    return [one(text) for text in completions]

async def together(solution_str, **_):
    global running
    word, _, rest = solution_str.partition(" ")
    if word == "all":
        running += 1
        await asyncio.sleep(0.1)
        return running
    if word == "loop":
        loops.add(asyncio.get_running_loop())
        return len(loops)
    if word == "cancel":
        raise asyncio.CancelledError("of its own")
    if word == "sys_exit":
        raise SystemExit(3)
    if word == "after":
        await asyncio.sleep(0.2)
        os._exit(5)
    if word == "hang":
        Path("hangs").touch()
    if word in ("hang", "never"):
        await asyncio.sleep(1000)
    return one(solution_str)

async def async_batch(completions, **_):
    return await asyncio.gather(*(together(text) for text in completions))

class Judge:
    async def __call__(self, solution_str, **_):
        return await together(solution_str)

judge = Judge()
"""


pytestmark = pytest.mark.usefixtures("folder")


def group(texts, name="one", task_id="t"):
    task = Task(task_id, "file", f"functions.py:{name}", prompt="2 + 2", columns={"answer": "4"})
    return [ScoreRequest(task, text) for text in texts]


@asynccontextmanager
async def pool_of(num_workers=1, **options):
    pool = RewardPool(RewardsConfig(num_workers=num_workers, **options))
    try:
        yield pool
    finally:
        await pool.close()


def score(*groups, **options):
    """Each group's rewards, scored one after the other, and the pool's counters that are not 0."""

    async def run():
        async with pool_of(**options) as pool:
            rewards = [await pool.score(requests) for requests in groups]
            return rewards, {name.removeprefix("rewards/"): n for name, n in pool.stats().items() if n}

    return skipping(run())


def scores(rewards):
    return [r.score for r in rewards]


# Who scores what


def test_groups_are_scored_whole_and_concurrently(folder):
    async def run():
        async with pool_of(3) as pool:
            waiting = [asyncio.create_task(pool.score(group(["pid", "wait go", "pid"]))) for _ in range(3)]
            more = asyncio.create_task(pool.score(group(["pid"])))
            while not all(h.pid for h in pool.health()):
                await asyncio.sleep(0.01)
            gauges = pool.stats()
            (folder / "go").touch()
            held = [scores(await w) for w in waiting]
            return held, scores(await more), gauges, pool.stats()

    held, (last,), gauges, after = asyncio.run(run())
    assert all(first == second for first, _, second in held)
    assert len({first for first, *_ in held}) == 3 and last in {first for first, *_ in held}
    assert (gauges["rewards/busy_workers"], gauges["rewards/queue"]) == (3, 1)
    assert gauges["rewards/longest_call_s"] > after["rewards/longest_call_s"] == 0
    assert (after["rewards/busy_workers"], after["rewards/queue"]) == (0, 0)


def test_groups_are_scored_in_order_of_arrival():
    async def run():
        async with pool_of(1) as pool:
            done = []

            async def ask(name, times):
                for _ in range(times):
                    await pool.score(group(["a"]))
                    done.append(name)  # and it asks again before the next in the queue has woken up

            await asyncio.gather(ask("first", 3), ask("second", 1), ask("third", 1))
            return done

    assert asyncio.run(run()) == ["first", "second", "third", "first", "first"]


def test_waiting_single_calls_share_one_exchange():
    """As beside the engine of this process, which gives others a few turns between two decode steps."""

    async def run():
        async with pool_of(1) as pool:
            await pool.score(group(["a"]))
            assert pool.scores_singly(group(["a"])[0].task)
            scored = asyncio.gather(*(pool.score(group(["a" * i], task_id=str(i))) for i in range(1, 31)))
            steps = 0
            while not scored.done():
                for _ in range(16):
                    await asyncio.sleep(0)
                time.sleep(0.05)
                steps += 1
            return [scores(rewards)[0] for rewards in await scored], steps

    found, steps = asyncio.run(run())
    assert found == list(range(1, 31))
    assert steps <= 8, "one by one: 30"


def test_of_single_calls_that_go_together_each_has_its_own_end():
    async def run():
        async with pool_of(1, timeout_s=1.0, retries=0) as pool:
            await pool.score(group(["a"]))
            held = asyncio.create_task(pool.score(group(["sleep 0.2"], task_id="held")))
            await asyncio.sleep(0.05)  # the others wait behind it
            texts = ["aa", "exit", "aaa", "sleep 60", "aaaa", "raise f"]
            calls = [asyncio.create_task(pool.score(group([text], task_id=text))) for text in texts]
            dropped = asyncio.create_task(pool.score(group(["b"], task_id="dropped")))
            await asyncio.sleep(0.05)
            dropped.cancel()
            rewards = [(await call)[0] for call in calls]
            await held
            after = scores(await pool.score(group(["aaaaa"])))
            return rewards, after, pool.stats(), dropped.cancelled() or await asyncio.wait([dropped])

    rewards, after, stats, _ = skipping(run())
    assert [r.score for r in rewards] == [2, None, 3, None, 4, None]
    assert after == [5] and (stats["rewards/busy_workers"], stats["rewards/queue"]) == (0, 0)


def test_rewards_do_not_depend_on_the_number_of_workers():
    texts = [["a", "bb", "exit", "ccc"], ["raise f", "d" * 7], ["nothing"]]

    async def run(rewarder):
        try:
            everything = await asyncio.gather(*(rewarder.score(group(t, task_id=str(i))) for i, t in enumerate(texts)))
            return everything, rewarder.stats()
        finally:
            await rewarder.close()

    alone, counted = asyncio.run(run(RewardWorker(RewardsConfig())))
    for num_workers in (1, 3):
        rewards, stats = asyncio.run(run(RewardPool(RewardsConfig(num_workers=num_workers))))
        assert rewards == alone
        assert stats == counted | {"rewards/busy_workers": 0, "rewards/queue": 0, "rewards/longest_call_s": 0}
    assert scores(alone[0]) == [1, 2, None, 3]


def test_cancelled_call_frees_its_worker_with_a_new_process():
    async def run():
        async with pool_of(1) as pool:
            calls = [asyncio.create_task(pool.score(group(["sleep 100"]))) for _ in range(3)]
            while pool.health()[0].silent_s is None:
                await asyncio.sleep(0.01)
            pid = pool.health()[0].pid
            for call in calls:  # one at work, two in the queue
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            (now,) = scores(await pool.score(group(["pid"])))
            return pid, now, pool.stats()

    pid, now, stats = asyncio.run(run())
    assert now != pid and not any(stats.values())


def test_the_default_leaves_a_core_to_the_trainer(monkeypatch):
    for cores, num_workers in ((1, 1), (2, 1), (4, 3), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)), raising=False)
        assert RewardsConfig().num_processes == num_workers
        assert len(RewardPool().health()) == num_workers
    assert RewardsConfig(num_workers=7).num_processes == 7


def test_only_per_sample_functions_score_singly():
    def task(name):
        return Task("t", "file", f"functions.py:{name}", prompt="2 + 2")

    async def run(streaming):
        async with pool_of(2, streaming=streaming) as pool:
            unknown = pool.scores_singly(task("one"))
            found = {}
            for name in ("one", "batch", "together", "judge", "async_batch"):
                await pool.probe(task(name))
                found[name] = pool.scores_singly(task(name))
            return unknown, found

    for streaming in (True, False):
        unknown, found = asyncio.run(run(streaming))
        assert unknown is False, "a batch function would be called with one completion"
        assert found == {"one": streaming, "batch": False, "together": False, "judge": False, "async_batch": False}


# Time limits


def until(condition):
    """Hold the event loop up until then, as a training step does."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def resting(pool):
    """Whether its first worker waits for something: what it had to say before that is said."""
    process = psutil.Process(pool.health()[0].pid)
    return lambda: process.status() == psutil.STATUS_SLEEPING


def test_reply_during_a_blocked_event_loop_is_in_time(folder):
    async def run():
        async with pool_of(1, **LIMIT) as pool:
            call = asyncio.create_task(pool.score(group(["mark begun", "wait go", "mark done"])))
            while not (folder / "begun").exists():
                await asyncio.sleep(0.005)
            (folder / "go").touch()
            until((folder / "done").exists)
            until(resting(pool))  # it has told what it has done
            asyncio.get_running_loop().skip(150)
            return await call, pool.stats()["rewards/timeouts"]

    rewards, timeouts = skipping(run())
    assert not any(r.missing for r in rewards) and timeouts == 0


def test_sample_begun_during_a_blocked_loop_has_its_full_limit(folder):
    async def run():
        async with pool_of(1, **LIMIT) as pool:
            texts = ["mark begun", "wait go", "mark half", "wait more"]
            call = asyncio.create_task(pool.score(group(texts)))
            while not (folder / "begun").exists():
                await asyncio.sleep(0.005)
            (folder / "go").touch()
            until((folder / "half").exists)
            until(resting(pool))
            asyncio.get_running_loop().skip(150)
            await asyncio.sleep(0.3)  # the limit of a call that is seen as one is over
            assert not call.done()
            (folder / "more").touch()
            return await call, pool.stats()["rewards/timeouts"]

    rewards, timeouts = skipping(run())
    assert not any(r.missing for r in rewards) and timeouts == 0


def test_unread_request_ends_at_the_limit():
    async def run():
        async with pool_of(1, **LIMIT) as pool:
            await pool.score(group(["a"]))
            os.kill(pool.health()[0].pid, signal.SIGSTOP)
            call = asyncio.create_task(pool.score(group(["b" * 1_000_000])))
            while not call.done():
                await asyncio.sleep(0.05)
                asyncio.get_running_loop().skip(150)
            return await call, await pool.score(group(["c"]))

    stopped, fine = skipping(run())
    assert stopped[0].error == "timeout after 100 s" and scores(fine) == [1]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("one", [["alarm", "sleep 1.2"]]),
        ("together", [["alarm"], ["sleep 1.2"]]),
        ("batch", [["alarm"], ["sleep 1.2"]]),
    ],
)
def test_a_pending_alarm_does_not_end_a_later_call(name, groups):
    rewards, counted = score(*(group(texts, name) for texts in groups))
    assert not any(r.missing for scored in rewards for r in scored) and not counted


# Tries


def test_a_death_and_a_timeout_are_tried_again_on_a_fresh_worker():
    texts = ["count c", "flaky f", "slow_once s", "count c", "count c"]
    (rewards,), counted = score(group(texts), retries=1, **LIMIT)
    assert scores(rewards) == [1, len("flaky f"), len("slow_once s"), 2, 3], "and what was scored is not scored again"
    assert counted == {"crashes": 1, "timeouts": 1, "retries": 2}


def test_tries_are_used_up_and_an_exception_is_not_tried_again(folder):
    (rewards,), counted = score(group(["exit", "raise f", "a"]), retries=2, quarantine_after=0)
    assert scores(rewards) == [None, None, 1]
    assert "exit code 3" in rewards[0].error and "KeyError" in rewards[1].error
    assert counted == {"crashes": 3, "retries": 2, "errors": 1}
    assert (folder / "f").read_text() == "x"


def test_loading_is_tried_again_too(folder):
    (folder / "slow.py").write_text(
        "import os, time\nif not os.path.exists('once'):\n    open('once', 'w').close()\n"
        "    open('hangs', 'w').close()\n    time.sleep(1000)\n"
        "def f(completions, **_): return [1.0] * len(completions)\n"
    )
    requests = [ScoreRequest(Task("t", "s", "slow.py:f", prompt="p"), "a")]
    (rewards,), counted = score(requests, retries=1)
    assert scores(rewards) == [1] and counted == {"timeouts": 1, "retries": 1}


def test_the_watchdog_allows_for_every_try():
    assert RewardsConfig(timeout_s=2, startup_timeout_s=5).allowed_s(3) == 5 + 3 * 2
    assert RewardsConfig(timeout_s=2, startup_timeout_s=5, retries=2).allowed_s(3) == 3 * (5 + 3 * 2)


# Quarantine


def test_a_task_that_keeps_ending_workers_is_not_scored_any_more():
    first, second = group(["exit", "a", "exit"], task_id="bad"), group(["exit", "b", "c"], task_id="bad")
    other = group(["exit", "d"], task_id="good")
    (one, two, others, three), counted = score(first, second, other, group(["e"], task_id="bad"))
    assert scores(one) == [None, 1, None]
    assert scores(two) == [None, None, None] and "exit code" in two[0].error, "the third death"
    assert all(r.error.startswith("quarantined") for r in two[1:] + three)
    assert scores(others) == [None, 1]
    assert counted == {"crashes": 4, "quarantined": 3}


def test_quarantine_is_shared_by_the_workers_and_ends_the_tries(folder):
    async def run():
        async with pool_of(2, retries=9, quarantine_after=2) as pool:
            exits, waits = group(["exit"], "batch", "bad"), group(["wait go"], task_id="other")
            other = asyncio.create_task(pool.score(waits))
            (first,) = await pool.score(exits)
            (folder / "go").touch()
            await other
            (folder / "go").unlink()
            keep = asyncio.create_task(pool.score(waits))  # the first worker: now it is the second's turn
            while not pool.stats()["rewards/busy_workers"]:
                await asyncio.sleep(0)
            (second,) = await pool.score(exits)
            (folder / "go").touch()
            await keep
            return first, second, pool.stats()

    first, second, stats = asyncio.run(run())
    assert first.error == second.error and first.error.startswith("quarantined: the task's calls ended 2 workers")
    assert stats["rewards/crashes"] == 2 and stats["rewards/quarantined"] == 2 and stats["rewards/retries"] == 2


def test_hanging_probe_or_import_does_not_quarantine_a_task(folder):
    (folder / "slow.py").write_text("import time; open('hangs', 'w').close(); time.sleep(1000)")

    async def run():
        async with pool_of(1, quarantine_after=1, startup_timeout_s=100) as pool:
            with pytest.raises(RewardProbeError, match="timeout after 100 s"):
                await pool.probe(Task("t", "s", "slow.py:f", prompt="p"))
            with pytest.raises(RewardProbeError, match="quarantine|exit code 3"):
                await pool.probe(Task("t", "s", "functions.py:exits", prompt="p"))
            assert not any(pool.stats().values())
            await pool.score([ScoreRequest(Task("t", "s", "slow.py:f", prompt="p"), "a")])
            return await pool.score(group(["a"]))

    (folder / "functions.py").write_text(FUNCTIONS + "\ndef exits(completions, **_): os._exit(3)\n")
    assert scores(skipping(run())) == [1]


# Memory


def test_running_out_of_memory_costs_one_reward_and_the_process():
    (rewards, again), counted = score(
        group(["pid", "memory", "a", "pid"]), group(["pid"]), memory_gb=1.0, quarantine_after=0
    )
    before, failed, fine, after = rewards
    assert failed.error.startswith("out of memory (rewards.memory_gb = 1): MemoryError") and fine.score == 1
    assert before.score != after.score == again[0].score
    assert counted == {"out_of_memory": 1}


def test_function_that_hoards_memory_gets_a_new_process():
    (rewards,), counted = score(group(["hoard"] * 8), memory_gb=0.7, quarantine_after=0)
    assert scores(rewards) == [1, 2, 3, None, 1, 2, 3, None]
    assert counted == {"out_of_memory": 2}


# async def


@pytest.mark.parametrize("name", ["together", "judge", "async_batch"])
def test_async_calls_of_a_group_run_at_the_same_time(name):
    (rewards,), _ = score(group(["all"] * 5, name))
    assert scores(rewards) == [5] * 5


def test_async_functions_share_one_event_loop():
    (first, second, third), _ = score(*(group(["loop"], name) for name in ("together", "async_batch", "together")))
    assert scores(first + second + third) == [1, 1, 1]


def test_async_failures_leave_the_others_valid():
    texts = ["a", "raise f", "cancel", "sys_exit", "bb"]
    (rewards,), counted = score(group(texts, "together"))
    assert scores(rewards) == [1, None, None, None, 2]
    assert [r.error.split(":")[0] for r in rewards[1:4]] == ["KeyError", "CancelledError", "SystemExit"]
    assert counted == {"errors": 3}


def test_async_calls_have_one_limit_together():
    (rewards, fine), counted = score(group(["hang", "a", "hang", "bb"], "together"), group(["a"], "together"), **LIMIT)
    assert scores(rewards) == [None, 1, None, 2] and scores(fine) == [1]
    assert rewards[0].error == "timeout after 100 s" and counted == {"timeouts": 1}


def test_a_death_among_async_calls_keeps_what_has_returned():
    (rewards,), counted = score(group(["a", "after", "never"], "together"))
    assert scores(rewards) == [1, None, None] and "exit code 5" in rewards[2].error
    assert counted == {"crashes": 1}


# Signs of life, and the end


def test_health_shows_what_works_since_when_and_what_is_silent():
    async def run():
        async with pool_of(2) as pool:
            assert [h[1:] for h in pool.health()] == [(None, None, None)] * 2
            await pool.score(group(["a"]))
            call = asyncio.create_task(pool.score(group(["sleep 100"])))
            await asyncio.sleep(0.3)
            working, idle = pool.health()
            assert (working.index, idle.index) == (0, 1) and idle.pid is None
            assert alive(working.pid) and working.busy_s >= 0.25 and working.silent_s >= 0
            call.cancel()
            await asyncio.wait([call])
            (pid,) = scores(await pool.score(group(["pid"])))
            rested = pool.health()[0]
            assert rested.pid == pid and rested.busy_s is None and rested.silent_s >= 0

    asyncio.run(run())
