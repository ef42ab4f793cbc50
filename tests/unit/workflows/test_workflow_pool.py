"""workflow.num_processes: plain functions in worker processes, which may block, fail and die as they like."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollover.config import WorkflowConfig
from rollover.live_objects import hold, release
from rollover.types import Reward, SamplingParams, Task
from rollover.workflows.build import build_workflow
from rollover.workflows.pool import WorkerFailed, WorkflowPool
from rollover.workflows.protocol import Lane, WorkflowFunction
from unit.rewards.children import alive, wait_until_dead

TASK = Task("t", "sums", "", messages=({"role": "user", "content": "What is 2+2?"},), columns={"answer": "4"})
VALUES = {"task": TASK, "episode": None, "base_url": "http://127.0.0.1:9/v1", "api_key": "key-1", "model": "policy"}
FUNCTIONS = """
import os, signal, subprocess, time
from rollover import Reward

def told(task, base_url, api_key, model, more=3):
    assert (base_url, api_key, model, more) == ("http://127.0.0.1:9/v1", "key-1", "policy", 3)
    print("this disturbs nobody")
    return float(task.columns["answer"]) + len(task.messages)

def client(client):
    return float(client.api_key == "key-1" and str(client.base_url) == "http://127.0.0.1:9/v1/")

def rewards():
    return {"solver": 1, "judge": Reward(0.5, {"close": 1.0}, turns=[0.25, 0.25])}

def nothing():
    return None

def pid():
    return os.getpid()

def text():
    return "good"

def wrong_role():
    return {"solver": "good"}

def raises():
    raise KeyError("no such thing")

def exits():
    raise SystemExit(3)

def dies():
    os._exit(4)

def killed():
    os.kill(os.getpid(), signal.SIGSEGV)

def fills():
    return float(len(bytearray(2**29)))

def forks():
    os.fork()
    return 1.0

async def asynchronous(task):
    return 1.0

def episodic(task, episode):
    return 1.0

def strange(task, dataset):
    return 1.0

def hangs():
    started = [subprocess.Popen(["sleep", "1000"]), subprocess.Popen(["sleep", "1000"], start_new_session=True)]
    with open("pids.new", "w") as file:
        print(os.getpid(), *(p.pid for p in started), file=file)
    os.rename("pids.new", "pids")
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


def build(name: str, **settings: Any) -> Any:
    values = {"function": f"agents.py:{name}", "num_processes": 1} | settings
    return build_workflow(WorkflowConfig(**values), SamplingParams(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("env", "seen"), [({}, 2.0), ({"env": ["*", "!*_TOKEN"]}, 1.0), ({"env": ["PATH"]}, 0.0), ({"env": ["*"]}, 3.0)]
)
def test_workflow_env_chooses_the_variables(tmp_path, monkeypatch, env: dict[str, list[str]], seen: float) -> None:
    for name in ("MY_NAME", "HF_TOKEN", "ROLLOVER_SERVER_TOKEN"):
        monkeypatch.setenv(name, "x")
    num = 'float(len({"MY_NAME", "HF_TOKEN", "ROLLOVER_SERVER_TOKEN"} & os.environ.keys()))'
    file = tmp_path / "agent.py"
    file.write_text(f"import json, os\ndef solve():\n    return {num}\n")
    program = f'import json, os; print(json.dumps({{"reward": {num}}}))'
    for player in ({"function": f"{file}:solve", "num_processes": 1}, {"command": ["python", "-c", program]}):
        workflow = build_workflow(WorkflowConfig(**player, **env), SamplingParams(), None)  # type: ignore[arg-type]
        values = VALUES | {"episode": SimpleNamespace(episode_id="1")}

        async def run(workflow: Any = workflow, values: Any = values) -> Any:
            try:
                return await workflow(values)
            finally:
                await workflow.close()

        assert asyncio.run(run()) == Reward(seen)


def answers(pool: WorkflowPool, num: int = 1) -> list[Any]:
    """Of so many runs, one after the other; what they raise is an answer, too."""

    async def run() -> list[Any]:
        try:
            return [*[(await asyncio.gather(pool(VALUES), return_exceptions=True))[0] for _ in range(num)]]
        finally:
            await pool.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("told", Reward(5.0)),
        ("client", Reward(1.0)),
        ("rewards", {"solver": Reward(1.0), "judge": Reward(0.5, {"close": 1.0}, turns=(0.25, 0.25))}),
        ("nothing", None),
        ("forks", Reward(1.0)),
    ],
)
def test_it_gets_its_arguments_and_returns_its_answer(name: str, expected: Any) -> None:
    pytest.importorskip("openai")
    assert answers(build(name), num=2) == [expected] * 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("text", r"workflow.function = 'agents.py:text' \(agents.py:\d+\) returned 'good' \(str\); it must return"),
        ("wrong_role", "returned 'good' .*'solver'"),
        ("raises", r"^KeyError: 'no such thing' \(agents.py:\d+\)$"),
        ("exits", r"^SystemExit: 3 \(agents.py:\d+\)$"),
        ("dies", r"^its worker process died in this call \(exit code 4\)$"),
        ("killed", "killed by SIGSEGV"),
        ("fills", r"^out of memory \(workflow.memory_gb = 0.2\): MemoryError"),
    ],
)
def test_what_fails_is_named_and_the_next_one_has_a_worker(name: str, why: str) -> None:
    for error in answers(build(name, memory_gb=0.2), num=2):
        with pytest.raises(WorkerFailed, match=why):
            raise error


def test_workflow_pool_reuses_workers_within_its_limit() -> None:
    pool = build("pid", num_processes=2)

    async def run() -> list[Any]:
        try:
            return await asyncio.gather(*(pool(VALUES) for _ in range(6)))
        finally:
            await pool.close()

    pids = {int(reward.score) for reward in asyncio.run(run())}
    assert len(pids) == 2 and os.getpid() not in pids and not any(map(alive, pids))


def test_one_that_hangs_is_killed_with_all_that_it_has_started() -> None:
    async def run() -> list[int]:
        pool = build("hangs")
        playing = asyncio.ensure_future(pool(VALUES))
        while not Path("pids").exists():
            await asyncio.sleep(0.02)
        pids = [int(pid) for pid in Path("pids").read_text().split()]
        assert len(pids) == 3 and all(map(alive, pids))
        await pool.close()
        with pytest.raises(WorkerFailed):
            await playing
        return pids

    assert not any(map(alive, asyncio.run(run())))


def test_a_program_steps_it_by_several_event_loops() -> None:
    pool = build("pid")
    assert len({reward.score for reward in answers(pool) + answers(pool)}) == 2


def test_a_function_of_the_program_travels() -> None:
    weight = 0.25

    def played(task: Any) -> float:
        return weight * len(task.messages)

    spec = hold(played, "played")
    try:
        pool = build_workflow(WorkflowConfig(function=spec, num_processes=1), SamplingParams(), None)  # type: ignore[arg-type]
        assert answers(pool) == [Reward(0.25)]  # type: ignore[arg-type]
    finally:
        release(spec)


@pytest.mark.parametrize(
    ("name", "num", "why"),
    [
        ("pid", 0, "is no async def.*Set workflow.num_processes"),
        ("asynchronous", 1, "an async def.*Remove workflow.num_processes"),
        ("episodic", 1, "'episode'.*the run's own process. Ask by client.*task, client, base_url, api_key, model$"),
        ("strange", 1, "'dataset', for which there is no value. Its"),
    ],
)
def test_what_cannot_be_played_is_refused_with_the_fix(name: str, num: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        build(name, num_processes=num)
    assert isinstance(build("asynchronous", num_processes=0), WorkflowFunction)


def test_an_evaluation_does_not_wait_for_the_workers_of_training() -> None:
    """Training's episodes wait for the model meanwhile, with their workers: that would be for ever."""

    async def run() -> tuple[Any, bool]:
        pool = build("hangs")
        waits = asyncio.ensure_future(pool(VALUES))
        while not os.path.exists("pids"):
            await asyncio.sleep(0.02)
        os.rename("agents.py", "hanging.py")
        Path("agents.py").write_text(
            'import os\ndef hangs():\n    print(os.getpid(), file=open("pids", "a"))\n    return 0.5\n'
        )
        answer = await asyncio.wait_for(pool(VALUES, nullcontext, Lane.EVALUATION), 60)
        assert not waits.done()
        waits.cancel()
        await asyncio.wait([waits])
        await pool.close()
        return answer, wait_until_dead([int(pid) for pid in Path("pids").read_text().split()], 20)

    answer, gone = asyncio.run(run())
    assert answer == Reward(0.5) and gone
