"""workflow.command: a program in any language plays an Episode, and calls the policy over HTTP.

    environment    OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL: the gateway, and the key of this Episode
                   ROLLOVER_EPISODE: the Episode's id, the same after a restart
    stdin          the task as a JSON object: task_id, source, attempt, prompt, messages, columns
    last line      {"reward": 1.0}, {"rewards": {"solver": 1.0, "judge": 0.0}} or {"answer": "42"}

Each Episode starts the program, without a shell, in its own process group under a supervisor (processes.py). The
supervisor kills it and all its descendants when it exits, times out, or the run ends, even by SIGKILL.

A reward is valid only in a JSON object on the last line: a policy whose output is printed could otherwise set its own
reward.
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
from rollover.workflows.protocol import Answer, AsksByKey, Lane, PerLane, Waiting, as_answer

KEY = "workflow.command"
MAX_CONCURRENT = 64
_MAX_LINE_BYTES = 2**20  # of the last line
_EXIT_LIMIT_S = 5.0
_MAX_ERROR_BYTES = 400  # of stderr, in a message
_HOW_TO_ANSWER = 'Print {"reward": 1.0}, {"rewards": {"policy": 1.0}} or {"answer": "42"} as the last line'
ScoreAnswer = Callable[[Task, str, int], Awaitable[Reward]]
"""(task, answer, policy version of the Episode) -> reward."""


class ProgramFailed(Exception):
    """The program failed, or its last line is invalid."""


class WorkflowCommand(AsksByKey):
    """Workflow that runs a program, `words`, for each Episode. ValueError if the program does not exist.

    `score_answer` scores an answer without a reward. Each lane runs at most `at_once` programs (0: MAX_CONCURRENT),
    with `memory_bytes` per process (0: no limit). `visible`: as of `child_environment`.
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
        # Our own interpreter has the user's packages, whether or not the environment is activated.
        self._words = [sys.executable if words[0] in ("python", "python3") else words[0], *words[1:]]
        if shutil.which(self._words[0]) is None:
            raise ValueError(
                f"{KEY} = {self.spec!r}: there is no program {words[0]!r} that can be run. Write its name or its path,"
                " and its arguments behind it; a script needs its interpreter before it, as in python agent.py"
            )
        self._score_answer, self._memory_bytes, self._visible = score_answer, memory_bytes, visible
        self._places = PerLane(lambda: asyncio.Semaphore(at_once or MAX_CONCURRENT))
        self._running: set[asyncio.subprocess.Process] = set()
        self._endings: set[asyncio.Future[None]] = set()

    async def __call__(
        self, values: Mapping[str, Any], waiting: Waiting = nullcontext, lane: Lane = Lane.TRAINING, /
    ) -> Answer:
        """Run the program. ProgramFailed if it fails."""
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
        """Kill every program and wait for its end."""
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
            _, stdout, stderr = await asyncio.gather(
                _write(process.stdin, _task_json(values["task"])),
                _tail(process.stdout, _MAX_LINE_BYTES),
                _tail(process.stderr, _MAX_ERROR_BYTES),
            )
            await process.wait()
        finally:
            self._end(process)
        if process.returncode != 0:
            raise ProgramFailed(f"{how_it_ended(process.returncode)}{_quoted(stderr)}")
        lines = stdout.decode("utf-8", "replace").rstrip().splitlines()
        if not lines:
            raise ProgramFailed(f"it printed nothing. {_HOW_TO_ANSWER}{_quoted(stderr)}")
        return lines[-1]

    def _end(self, process: asyncio.subprocess.Process) -> None:
        self._running.discard(process)
        if process.returncode is None:
            ending = asyncio.ensure_future(_killed(process))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _answer(self, task: Task, line: str, episode: Episode) -> Answer:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = {}
        given = [name for name in ("reward", "rewards", "answer") if isinstance(found, dict) and name in found]
        if len(given) != 1:
            raise ProgramFailed(f"its last line is {shortened(line)}. {_HOW_TO_ANSWER}")
        [name], value = given, found[given[0]]
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
    """Kill a program and its descendants: by its supervisor (`process`), or by SIGKILL if that does not react."""
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
    """Return the visible variables and those of the gateway, under both names that clients read."""
    base_url, ours = values["base_url"], child_environment(visible)
    ours |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": values["api_key"]}
    return ours | {"OPENAI_MODEL": values["model"], "ROLLOVER_EPISODE": values["episode"].episode_id}


def _task_json(task: Task) -> bytes:
    """Return the program's input. `prompt`: the problem's text, if the data has one."""
    fields = task.to_json()
    del fields["reward"], fields["plain"]
    prompt = task.reward_prompt
    return json.dumps(fields | {"prompt": prompt if isinstance(prompt, str) else None}).encode() + b"\n"


async def _write(stdin: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # the program need not read its input
        stdin.write(text)
        await stdin.drain()
    stdin.close()


async def _tail(stream: asyncio.StreamReader, num_bytes: int) -> bytes:
    """Read the stream to its end and return the last `num_bytes`."""
    tail = b""
    while chunk := await stream.read(2**16):
        tail = (tail + chunk)[-num_bytes:]
    return tail


def _quoted(stderr: bytes) -> str:
    """Return what a program wrote to stderr, on one line."""
    text = printable(" ".join(stderr.decode("utf-8", "replace").split()))
    return f"; the end of what it wrote to stderr: {text}" if text else ""
