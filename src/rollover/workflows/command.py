"""workflow.command: a program in any language plays an Episode, and asks the policy over HTTP.

    its environment    OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL: the gateway, and the key of this Episode
                       ROLLOVER_EPISODE: the Episode's id, the same when it begins again
    its input          the task, an object of JSON: task_id, source, attempt, prompt, messages, columns
    its last line      {"reward": 1.0}, {"rewards": {"solver": 1.0, "judge": 0.0}} or {"answer": "42"}

It is started for every Episode, by no shell, in a process group of its own under a keeper (processes.py): that ends it,
and all that it has started, when it ends, when its time is up, and when the run does, killed or not.

Rewards stand in an object of JSON, and never in what the program prints besides: a policy whose words are printed could
give itself any.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from rollover.functions import shortened
from rollover.processes import ALL, child_command, child_environment
from rollover.text import printable
from rollover.types import Reward, Task
from rollover.workers.worker import how_it_ended
from rollover.workflows.episode import Episode
from rollover.workflows.function import as_answer
from rollover.workflows.protocol import Answer, AsksByKey, Lane, PerLane, Waiting

KEY = "workflow.command"
MOST_AT_ONCE = 64
_MAX_LINE_BYTES = 2**20  # of its last line
_EXIT_LIMIT_S = 5.0
_MAX_ERROR_BYTES = 400  # of what a message shows of its standard error
_HOW_TO_ANSWER = 'Print {"reward": 1.0}, {"rewards": {"policy": 1.0}} or {"answer": "42"} as the last line'
ScoreAnswer = Callable[[Task, str, int], Awaitable[Reward]]  # the int: policy version of the episode


class ProgramFailed(Exception):
    """It did not end well, or its last line is no answer."""


class WorkflowCommand(AsksByKey):
    """`words`: the program and its arguments. ValueError where there is no such program.

    `score_answer` scores what a program answers without a reward. At most `at_once` of them run at a time in each
    lane (0: MOST_AT_ONCE), and each of their processes has `memory_bytes` (0: no limit). `visible`: as of
    `child_environment`.
    """

    wanted = ("task", "episode", "base_url", "api_key", "model")
    over_http = True

    def __init__(
        self,
        words: Sequence[str],
        score_answer: ScoreAnswer,
        at_once: int = 0,
        memory_bytes: int = 0,
        visible: Sequence[str] = ALL,
    ) -> None:
        self.spec = shlex.join(words)
        # The interpreter that runs us has what the user has installed beside us, activated or not.
        self._words = [sys.executable if words[0] in ("python", "python3") else words[0], *words[1:]]
        if shutil.which(self._words[0]) is None:
            raise ValueError(
                f"{KEY} = {self.spec!r}: there is no program {words[0]!r} that can be run. Write its name or its path,"
                " and its arguments behind it; a script needs its interpreter before it, as in python agent.py"
            )
        self._score_answer, self._memory_bytes, self._visible = score_answer, memory_bytes, visible
        self._places = PerLane(lambda: asyncio.Semaphore(at_once or MOST_AT_ONCE))
        self._running: set[asyncio.subprocess.Process] = set()
        self._endings: set[asyncio.Future[None]] = set()

    async def __call__(
        self, values: Mapping[str, Any], waiting: Waiting = nullcontext, lane: Lane = Lane.TRAINING, /
    ) -> Answer:
        """ProgramFailed where it fails."""
        places = self._places.here(lane)
        with waiting():
            await places.acquire()
        try:
            last = await self._last_line(values)
        finally:
            places.release()
        with waiting():
            return await self._answer(values["task"], last, values["episode"])

    async def close(self) -> None:
        """End every program, and wait until all of them are gone."""
        for process in list(self._running):
            self._end(process)
        if self._endings:
            await asyncio.wait(self._endings)

    # Private

    async def _last_line(self, values: Mapping[str, Any]) -> str:
        command = child_command(
            "rollover.workflows.program",
            os.environ.get("PYTHONPATH", ""),
            self._memory_bytes,
            *self._words,
            kept=True,
        )
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(values, self._visible),
            process_group=0,
        )
        self._running.add(process)
        try:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            _, said, complained = await asyncio.gather(
                _tell(process.stdin, _told(values["task"])),
                _tail(process.stdout, _MAX_LINE_BYTES),
                _tail(process.stderr, _MAX_ERROR_BYTES),
            )
            await process.wait()
        finally:
            self._end(process)
        if process.returncode != 0:
            raise ProgramFailed(f"{how_it_ended(process.returncode)}{_quoted(complained)}")
        lines = said.decode("utf-8", "replace").rstrip().splitlines()
        if not lines:
            raise ProgramFailed(f"it printed nothing. {_HOW_TO_ANSWER}{_quoted(complained)}")
        return lines[-1]

    def _end(self, process: asyncio.subprocess.Process) -> None:
        self._running.discard(process)
        if process.returncode is None:
            ending = asyncio.ensure_future(_killed(process))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _answer(self, task: Task, line: str, episode: Episode) -> Answer:
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = {}
        given = [name for name in ("reward", "rewards", "answer") if isinstance(said, dict) and name in said]
        if len(given) != 1:
            raise ProgramFailed(f"its last line is {shortened(line)}. {_HOW_TO_ANSWER}")
        [name], value = given, said[given[0]]
        if name == "answer":
            if not isinstance(value, str):
                raise ProgramFailed(f"its answer is {shortened(value)}: write a text")
            return await self._score_answer(task, value, episode.policy_version)
        try:
            if isinstance(value, dict) == (name == "rewards") and (answer := as_answer(value)) is not None:
                return answer
        except ValueError as error:
            raise ProgramFailed(f"its {name}: {error}. Write finite numbers") from None
        raise ProgramFailed(f"its {name}: {shortened(value)}. {_HOW_TO_ANSWER}")


# Private


async def _killed(process: asyncio.subprocess.Process) -> None:
    """End a kept program and all that it started: its keeper, which `process` is, does so, unless it is not able to."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _EXIT_LIMIT_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _environment(values: Mapping[str, Any], visible: Sequence[str]) -> dict[str, str]:
    """The visible variables, and where the policy is asked, by either name that clients know."""
    base_url, ours = values["base_url"], child_environment(visible)
    ours |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": values["api_key"]}
    return ours | {"OPENAI_MODEL": values["model"], "ROLLOVER_EPISODE": values["episode"].episode_id}


def _told(task: Task) -> bytes:
    """The task, as its program reads it. `prompt`: the text of the problem, where the data has one."""
    said = task.to_json()
    del said["reward"], said["plain"]
    prompt = task.reward_prompt
    return json.dumps(said | {"prompt": prompt if isinstance(prompt, str) else None}).encode() + b"\n"


async def _tell(stdin: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it has ended, or closed its input: it need not read
        stdin.write(text)
        await stdin.drain()
    stdin.close()


async def _tail(stream: asyncio.StreamReader, num_bytes: int) -> bytes:
    """All that comes, but for what is longer ago than `num_bytes`."""
    tail = b""
    while chunk := await stream.read(2**16):
        tail = (tail + chunk)[-num_bytes:]
    return tail


def _quoted(complained: bytes) -> str:
    """What a program wrote to its standard error, on one line."""
    text = printable(" ".join(complained.decode("utf-8", "replace").split()))
    return f"; the end of what it wrote to stderr: {text}" if text else ""
