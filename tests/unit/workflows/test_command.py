"""workflow.command: what a program is told, what it may answer, and that nothing of it is left over."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollover.config.load import load_config
from rollover.types import Reward, Task
from rollover.workflows.command import ProgramFailed, WorkflowCommand
from unit.rewards.children import alive

MESSAGES = ({"role": "user", "content": "What is 2+2?"},)
TASK = Task("t", "sums", "", messages=MESSAGES, columns={"answer": "4"}, plain=True)
VALUES = {
    "task": TASK,
    "episode": SimpleNamespace(episode_id="3-1", policy_version=7),
    "base_url": "http://127.0.0.1:9/v1",
    "api_key": "key-1",
    "model": "policy",
}


async def scored(task: Task, answer: str, version: int) -> Reward:
    return Reward(float(answer == task.columns["answer"]))


def python(code: str, **options: Any) -> WorkflowCommand:
    return WorkflowCommand(["python", "-c", code], scored, **options)


def answer(command: WorkflowCommand, **values: Any) -> Any:
    async def run() -> Any:
        try:
            return await command(VALUES | values)
        finally:
            await command.close()

    return asyncio.run(run())


def test_it_is_told_its_task_and_where_the_policy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere/v1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/mine", os.environ.get("PYTHONPATH", "")]))
    code = """
import json, os, sys
said = {"task": json.load(sys.stdin), "group": os.getpgid(0) == os.getpid(), "pythonpath": os.environ["PYTHONPATH"]}
said |= {name: os.environ[name] for name in os.environ if name.startswith(("OPENAI", "ROLLOVER"))}
open(sys.argv[1], "w").write(json.dumps(said))
print('{"reward": 1}')
"""
    path = Path("told.json").absolute()
    assert answer(WorkflowCommand(["python", "-c", code, str(path)], scored)) == Reward(1.0)
    told = json.loads(path.read_text())
    path.unlink()
    assert told == {
        "task": {
            "task_id": "t", "source": "sums", "attempt": 0, "prompt": "What is 2+2?", "columns": {"answer": "4"},
            "messages": [{"role": "user", "content": "What is 2+2?"}],
        },
        "group": True,
        "pythonpath": os.environ["PYTHONPATH"],
        "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
        "OPENAI_API_BASE": "http://127.0.0.1:9/v1",
        "OPENAI_API_KEY": "key-1",
        "OPENAI_MODEL": "policy",
        "ROLLOVER_EPISODE": "3-1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"reward": 0.5, "log": "fine"}', Reward(0.5)),
        ('{"reward": true}', Reward(1.0)),
        ('{"rewards": {"solver": 1.0, "judge": -1}}', {"solver": Reward(1.0), "judge": Reward(-1.0)}),
        ('{"answer": "4"}', Reward(1.0)),
        ('{"answer": "{\\"reward\\": 1.0}"}', Reward(0.0)),
    ],
)
def test_its_last_line_is_its_answer(line: str, expected: Any) -> None:
    assert answer(python(f"print('step 1'); print({line!r}); print()")) == expected


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print('4')", "its last line is '4'. Print"),
        ("print('[1.0]')", r"its last line is '\[1.0\]'. Print"),
        ("""print('{"rewrad": 1.0}')""", "its last line is .*Print"),
        ("""print('{"reward": 1.0, "answer": "4"}')""", "its last line is .*Print"),
        ("""print('{"reward": "good"}')""", "its reward: 'good'"),
        ("""print('{"reward": NaN}')""", "its reward: nan"),
        ("""print('{"reward": null}')""", "its reward: None. Print"),
        ("""print('{"reward": {"solver": 1.0}}')""", "its reward: {'solver': 1.0}. Print"),
        ("""print('{"rewards": {"solver": "x"}}')""", "its rewards: 'x' .*'solver'"),
        ("""print('{"rewards": 1.0}')""", "its rewards: 1.0. Print"),
        ("""print('{"answer": 4}')""", "its answer is 4: write a text"),
        ("""print('{"answer": "' + 'x' * 2**21 + '"}')""", "its last line is "),
        ("import sys; print('why', file=sys.stderr)", "it printed nothing. Print .*stderr: why"),
        ("import sys; print('x' * 10**6, file=sys.stderr); sys.exit('no\\n  file')", "^exit code 1; .* no file$"),
        ("""print('{"reward": 1.0}'); raise SystemExit(3)""", "^exit code 3$"),
        ("import os; os.kill(os.getpid(), 11)", "^killed by SIGSEGV$"),
        ("import os; os.close(0); os.close(1); os.close(2)", "it printed nothing"),
    ],
)
def test_what_is_no_answer_is_a_failure(code: str, why: str) -> None:
    with pytest.raises(ProgramFailed, match=why) as failed:
        answer(python(code))
    assert len(str(failed.value)) < 700


def test_it_need_not_read_its_task() -> None:
    task = Task("t", "sums", "", prompt="x" * 2**20)
    assert answer(python("""print('{"reward": 1}')"""), task=task) == Reward(1.0)


def test_no_shell_reads_it_and_a_text_is_split_into_words() -> None:
    def words(value: Any) -> list[str]:
        found = load_config([{"workflow.command": value, "tasks.sources": [{"kind": "reasoning_gym", "name": "x"}]}])
        return found.config.workflow.command

    assert words(["sh", "-c", "a b"]) == ["sh", "-c", "a b"]
    assert words("python 'my agent.py' --n 3; rm $HOME") == ["python", "my agent.py", "--n", "3;", "rm", "$HOME"]
    code = """import json, sys; print(json.dumps({"answer": sys.argv[1]}))"""
    seen = []

    async def score(task: Task, said: str, version: int) -> Reward:
        seen.append((said, version))
        return Reward(0.0)

    answer(WorkflowCommand(["python", "-c", code, "$HOME; `ls` *"], score))
    assert seen == [("$HOME; `ls` *", 7)]
    assert answer(WorkflowCommand(["sh", "-c", """echo '{"reward": '$((1 + 1))'}'"""], scored)) == Reward(2.0)


def test_a_program_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="workflow.command = 'agnt --fast': there is no program 'agnt'"):
        WorkflowCommand(["agnt", "--fast"], scored)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process so")
def test_memory_is_limited() -> None:
    with pytest.raises(ProgramFailed, match="MemoryError"):
        answer(python("x = bytearray(2**29)", memory_bytes=2 * 10**8))


def test_command_concurrency_limit_stops_the_clock() -> None:
    code = """
import os, sys, time
here = sys.argv[1]
open(f"{here}/{os.getpid()}", "w").close()
time.sleep(0.1)
print('{"reward": %d}' % len(os.listdir(here)))
os.unlink(f"{here}/{os.getpid()}")
"""
    os.makedirs("running")
    command = WorkflowCommand(["python", "-c", code, os.path.abspath("running")], scored, at_once=2)
    waits: list[str] = []

    class Waiting:
        def __enter__(self) -> None:
            waits.append("begins")

        def __exit__(self, *error: object) -> None:
            waits.append("ends")

    async def run() -> list[Any]:
        return await asyncio.gather(*(command(VALUES, Waiting) for _ in range(6)))

    assert max(reward.score for reward in asyncio.run(run())) <= 2
    assert waits[:6] == ["begins", "ends"] * 2 + ["begins"] * 2 and waits.count("ends") == 12


TREE = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
session = subprocess.Popen(["sleep", "1000"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1] + ".new", "w") as file:
            file.write(f"{os.getppid()} {os.getpid()} {child.pid} {session.pid}")
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        time.sleep(1000)
    time.sleep(1000)
"""


def tree(then: str) -> WorkflowCommand:
    return WorkflowCommand(["python", "-c", TREE + then, os.path.abspath("pids")], scored)


async def pids() -> list[int]:
    while not Path("pids").exists():
        await asyncio.sleep(0.02)
    found = [int(pid) for pid in Path("pids").read_text().split()]
    assert len(found) == 4 and all(map(alive, found))
    return found


async def closed(playing: asyncio.Future[Any], command: WorkflowCommand) -> None:
    await command.close()


async def ended(playing: asyncio.Future[Any], command: WorkflowCommand) -> None:
    Path("go").touch()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere what has left the process group is not found")
@pytest.mark.parametrize("how", [closed, ended], ids=lambda how: how.__name__)
def test_nothing_that_it_has_started_is_left_over(how: Callable[..., Any]) -> None:
    wait = "while not os.path.exists('go'): time.sleep(0.02)\n"

    async def run() -> list[int]:
        command = tree(wait)
        playing = asyncio.ensure_future(command(VALUES))
        found = await pids()
        await how(playing, command)
        with pytest.raises(ProgramFailed):
            await playing
        await command.close()
        return found

    assert not any(map(alive, asyncio.run(run())))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
