"""The reward `code` by its name: in a reward worker, from a configuration; and the problems of its recipe."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rollover.config import RewardsConfig
from rollover.config.load import load_config
from rollover.config.recipes import recipe
from rollover.plugins.sandbox import guarantees
from rollover.plugins.sandbox.cases import read_cases
from rollover.plugins.sandbox.guarantees import ProbeResult, choose_sandbox
from rollover.rewards.built_in import make_function, statements
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.worker import RewardProbeError, RewardWorker
from rollover.tasks.stream import TaskStream
from rollover.types import Task

TESTS = {"fn_name": "f", "inputs": ["1", "2", "3", "4"], "outputs": ["2", "3", "4", "5"]}
RIGHT, HALF = (
    "```python\ndef f(x):\n    return x + 1\n```",
    "```python\ndef f(x):\n    return x + 1 if x < 3 else 0\n```",
)


@pytest.fixture(scope="module", autouse=True)
def _sandbox() -> None:
    try:
        choose_sandbox("auto", allow_weak=False)
    except ValueError as error:
        pytest.skip(str(error))


def task(spec: str, **columns: Any) -> Task:
    return Task("t/0", "t", spec, prompt="Write f.", columns=columns)


def scored(spec: str, *completions: str, **columns: Any) -> list[Any]:
    async def main() -> list[Any]:
        worker = RewardWorker(RewardsConfig.model_validate({"timeout_s": 60.0}))
        try:
            await worker.probe(task(spec, **columns))
            return await worker.score([ScoreRequest(task(spec, **columns), text, (1,)) for text in completions])
        finally:
            await worker.close()

    return asyncio.run(main())


def test_the_share_of_the_tests_passed_is_the_score() -> None:
    right, half, bare, harmful, none = scored(
        "code", RIGHT, HALF, "def f(x): return x + 1", "import os\nos.kill(os.getppid(), 9)", "", tests=TESTS
    )
    assert [reward.score for reward in (right, half, bare, harmful, none)] == [1.0, 0.5, 1.0, 0.0, 0.0]
    assert half.extras["code_passed"] == half.extras["code_wrong"] == 0.5
    assert harmful.extras["code_error"] == 1
    assert none.extras["no_code"] == 1 and none.extras["code_error"] == 0
    assert right.extras.keys() == none.extras.keys()


def test_all_or_nothing_and_the_first_tests() -> None:
    assert [r.score for r in scored('code/{"all_or_nothing": true}', RIGHT, HALF, tests=TESTS)] == [1.0, 0.0]
    assert [r.score for r in scored('code/{"max_tests": 2}', RIGHT, HALF, tests=TESTS)] == [1.0, 1.0]


def test_time_and_memory_of_the_parameters() -> None:
    spec = 'code/{"timeout_s": 1, "memory_mb": 256}'
    slow, large = scored(spec, "while True: pass", "def f(x):\n    return len(bytearray(1 << 29))", tests=TESTS)
    assert slow.score == large.score == 0
    assert slow.extras["code_timeout"] == 1 and large.extras["code_memory"] > 0


def test_a_row_without_tests_is_missing_and_never_0() -> None:
    with pytest.raises(RewardProbeError, match="needs tests; the task's columns are answer"):
        scored("code", RIGHT, answer="")


def test_tests_that_cannot_be_run_are_missing() -> None:
    async def main() -> Any:
        worker = RewardWorker(RewardsConfig.model_validate({"timeout_s": 60.0}))
        try:
            broken = task("code", tests="import no_such_module\nassert f(1) == 2")
            return await worker.score([ScoreRequest(broken, RIGHT, (1,))])
        finally:
            await worker.close()

    (reward,) = asyncio.run(main())
    assert reward.score is None
    assert "the tests of the task cannot be run: ModuleNotFoundError" in reward.error


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"sandbox": "docker"}, "sandbox = 'docker': expected one of auto, bubblewrap, process, http"),
        ({"sandbox": "http"}, "url go together"),
        ({"url": "http://127.0.0.1:1"}, "url go together"),
        ({"timeout_s": 0}, "timeout_s = 0: it must be above 0"),
        ({"memory_mb": -1}, "memory_mb = -1: it must be above 0"),
        ({"max_tests": -1}, "at least 0"),
        ({"sandbx": "auto"}, "has no parameter 'sandbx'"),
    ],
)
def test_parameters_that_are_wrong_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_function("code", params, ".")


def test_a_machine_without_a_sandbox_refuses_unless_allowed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    weak = ProbeResult("process", ("network",))
    absent = ProbeResult("bubblewrap", failed="bubblewrap (bwrap) is not installed")
    monkeypatch.setattr(guarantees, "probe_sandbox", lambda launch: weak if launch.kind == "process" else absent)
    with pytest.raises(ValueError, match="allow_weak = true"):
        make_function("code", {}, ".")
    assert statements('code/{"allow_weak": true}') == [
        "code: programs run in a sandbox: process holds reading, writing, processes, memory, user; it does not hold"
        " network"
    ]


def test_what_holds_is_stated() -> None:
    (line,) = statements("code")
    assert line.startswith("code: programs run in a sandbox: ")
    assert "network, reading, writing, processes, memory" in line
    (remote,) = statements('code/{"sandbox": "http", "url": "http://127.0.0.1:1"}')
    assert "what that service guarantees" in remote
    assert statements("gsm8k") == []


def test_the_problems_of_the_recipe_are_held_out_as_problems() -> None:
    config = load_config([recipe("code")]).config
    sides = {}
    for split in ("train", "eval"):
        stream = TaskStream(config.tasks, seed=0, split=split, rewards=config.rewards)
        tasks = [stream.next() for _ in range(60)]
        sides[split] = {str(task.messages) for task in tasks if task is not None}
        for each in tasks:
            assert each is not None and each.reward == "code"
            assert len(read_cases(json.loads(json.dumps(each.columns)))) == 8
    assert not sides["train"] & sides["eval"]
