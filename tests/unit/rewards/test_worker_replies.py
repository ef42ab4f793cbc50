"""No reward under another's name: functions that fork, write to the worker's pipe, or return what no line can hold."""

from __future__ import annotations

import asyncio

import pytest

from rollover.config import RewardsConfig
from rollover.rewards.pool import RewardPool
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.worker import results_of
from rollover.types import Task
from rollover.workers.framing import BadMessage

FUNCTIONS = """
import json, os, time

own = os.getpid()

def once(name):
    if os.path.exists(name):
        return False
    open(name, "w").close()
    return True

def write_everywhere(data):
    for name in map(int, os.listdir("/proc/self/fd")):
        if name > 2:
            try:
                os.write(name, data)
            except OSError:
                pass

def misbehave(text):
    word, _, rest = text.partition(" ")
    if word == "fork":  # both come back, the copy with another score
        os.fork()
    if word == "fork_once" and once(rest):
        os.fork()
    if word == "write":
        write_everywhere(rest.encode() + b"\\n")
    if word == "later" and os.fork() == 0:  # when the call is over
        time.sleep(0.2)
        write_everywhere(b'{"call": 2, "index": 0, "result": {"score": 7.0, "extras": {}}}\\n')
        os._exit(0)
    if word == "flood":
        write_everywhere(b"x" * (65 << 20))
    if word == "slow":
        time.sleep(0.5)
    if word == "close":
        os.closerange(3, 100)
    # In JSON a character beyond the first 65,536 takes twelve bytes.
    extras = {f"{i:06d}" + chr(0x1F600) * 94: 1.0 for i in range(59_700)} if word == "large" else {}
    return {"score": len(text) + 1000.0 * (os.getpid() != own)} | extras

def one(solution_str):
    return misbehave(solution_str)

def batch(completions, **columns):
    return [misbehave(text) for text in completions]

async def together(solution_str):
    return misbehave(solution_str)
"""

pytestmark = pytest.mark.usefixtures("folder")


def requests_of(texts, name):
    return [ScoreRequest(Task("t", "file", f"functions.py:{name}", prompt="2 + 2"), text) for text in texts]


def score(name, *calls, **options):
    """The rewards of each call, one call after the other on one worker, and the counters that are not 0."""

    async def run():
        pool = RewardPool(RewardsConfig(num_workers=1, timeout_s=100, **options))
        try:
            rewards = [await pool.score(requests_of(texts, name)) for texts in calls]
            return rewards, {key.removeprefix("rewards/"): n for key, n in pool.stats().items() if n}
        finally:
            await pool.close()

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["one", "batch", "together"])
def test_fork_that_returns_from_the_function_shifts_no_reward(name):
    calls = [["a", "fork", "bb"], ["ccc", "fork_once f"], ["dddd"], ["eeeee", "ffffff"]]
    rewards, counted = score(name, *calls)
    assert [[r.score for r in scored] for scored in rewards] == [[len(text) for text in texts] for texts in calls]
    assert not counted


@pytest.mark.parametrize(
    "line",
    [
        '{"call": 1, "index": 0, "result": {"score": 7.0, "extras": {}}}',
        '{"index": 0, "result": {"score": 7.0, "extras": {}}}',
        "not JSON",
        "null",
        "{}",
    ],
)
def test_function_writing_to_the_pipe_gives_no_reward(line):
    (first, second), counted = score("one", ["a", f"write {line}", "bb"], ["ccc"], quarantine_after=0)
    assert [r.score for r in first[::2] + second] == [1, 2, 3]
    assert first[1].missing and "the reward worker" in first[1].error
    assert counted == {"crashes": 3, "retries": 2}


@pytest.mark.parametrize("name", ["one", "batch"])
def test_call_with_the_reply_of_an_earlier_one_is_retried(name):
    """Without retries, and nothing is held against its task: it was not its doing."""
    (_, second), counted = score(name, ["later"], ["slow"], retries=0, quarantine_after=1)
    assert [r.score for r in second] == [len("slow")]
    assert counted == {"crashes": 1, "retries": 1}


@pytest.mark.parametrize("name", ["one", "batch", "together"])
def test_too_long_result_is_missing(name):
    (first, second), counted = score(name, ["large"], ["a", "bb"])
    assert first[0].missing and "the function's result is 65 MiB long, above 64 MiB" in first[0].error
    assert [r.score for r in second] == [1, 2] and counted == {"errors": 1}


@pytest.mark.parametrize("word", ["flood", "close"])
def test_a_pipe_that_is_flooded_or_closed_does_not_end_the_run(word):
    (first, second), counted = score("one", ["a", word], ["bb"])
    assert first[0].score == 1 and first[1].missing and second[0].score == 2
    assert counted["crashes"] >= 1


@pytest.mark.parametrize(
    "results",
    [
        None,
        [],
        [{"score": 1.0, "extras": {}}],
        [{"score": 1.0, "extras": {}}, None],
        [{"score": 1.0, "extras": {}}, {"score": None, "extras": {}}],
        [{"score": 1.0, "extras": {}}, {"score": float("nan"), "extras": {}}],
        [{"score": 1.0, "extras": {}}, {"score": 1.0}],
        [{"score": 1.0, "extras": {}}, {"score": 1.0, "extras": {"a": "b"}}],
        [{"score": 1.0, "extras": {}}, {"error": 5}],
    ],
)
def test_results_that_are_none(results):
    with pytest.raises(BadMessage):
        results_of({"results": results}, "batch", {0, 1})
