"""The roles of a run on a node: a server host, a rank, a reward pool, each in a process that a cluster started.

Each process ends with its parent: a killed cluster daemon would otherwise leave processes behind, next to their
replacements. Independent of ray; cluster.py creates actors of these classes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollover.config import Config, RewardsConfig
from rollover.engine.remote.client import ServerFailed
from rollover.engine.remote.hosts import ProcessHost
from rollover.files import start_folder
from rollover.process_tree import has_ended, resident_bytes
from rollover.processes import brief_waiting, die_with
from rollover.rewards.pool import RewardPool
from rollover.rewards.protocol import ScoreRequest
from rollover.rewards.registry import TrainerState
from rollover.rewards.serialization import packed
from rollover.rewards.worker import RewardProbeError
from rollover.trainer.backend import BackendLost
from rollover.trainer.ranks.group import LocalRanks
from rollover.trainer.ranks.process import error_answer
from rollover.types import Task

_LIBRARY_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # clusters set these to their own defaults


@dataclass(frozen=True)
class RoleContext:
    """The controller's context for a role: log file, working directory, environment variables."""

    log: str
    folder: str
    environment: Mapping[str, str]

    @classmethod
    def from_this_process(cls, log: Path, gpus: str = "") -> RoleContext:
        """Return this process's context. log: the role's output file. gpus: visible ones; "": the cluster's choice."""
        carried = ("HF_", "ROLLOVER_", "TOKENIZERS_", "GOMP_", "OMP_WAIT_", *_LIBRARY_THREADS)
        environment = {name: value for name, value in os.environ.items() if name.startswith(carried)}
        environment |= {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        return cls(str(log.absolute()), start_folder(), environment)


class Role:
    """The setup shared by all roles."""

    def __init__(self, context: RoleContext) -> None:
        die_with(os.getppid())
        with contextlib.suppress(OSError):  # of another machine
            os.chdir(context.folder)
        for name in _LIBRARY_THREADS:
            os.environ.pop(name, None)
        os.environ.update(context.environment)
        os.makedirs(os.path.dirname(context.log), exist_ok=True)
        log = os.open(context.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)

    async def ping(self) -> int:
        """Return the memory of this process and its descendants, in bytes."""
        return resident_bytes(os.getpid())


class ServerRole(Role):
    """`rollover serve` in a child process, on `host`, with `server_token`. It starts once."""

    def __init__(self, context: RoleContext, config: Config, number: int, host: str, server_token: str) -> None:
        super().__init__(context)
        self._config, self._number, self._address, self._token = config, number, host, server_token
        self._logs = Path(context.log).parent  # where the server's own output goes, beside that of this process
        self._process: ProcessHost | None = None

    async def url(self, limit_s: float) -> dict[str, str]:
        """Return {"url"} when the server answers, or {"failed": why}."""
        if self._process is None:  # in this thread: on Linux a child ends with the thread that started it
            self._process = ProcessHost(self._config, self._number, limit_s, self._logs, self._address, self._token)
        try:
            return {"url": await asyncio.to_thread(self._process.address, limit_s)}
        except ServerFailed as error:
            return {"failed": str(error)}

    async def end(self) -> None:
        """Shut the server down."""
        if self._process is not None:
            await self._process.close()


class RankRole(Role):
    """A rank of the trainer, in a child process."""

    def __init__(self, context: RoleContext, config: Config, number: int, host: str) -> None:
        super().__init__(context)
        self._config, self._number, self._address = config, number, host
        self._logs = Path(context.log).parent
        self._rank: LocalRanks | None = None

    async def begin(self) -> None:
        """Start the rank."""
        backend, waiting = self._config.backend, brief_waiting(self._config.run)
        self._rank = LocalRanks(  # in this thread: on Linux a child ends with the thread that started it
            1, backend.rank_timeout_s, waiting, self._logs, host=self._address, first=self._number
        )

    async def call(self, verb: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return {"found": result}, {"lost": why}, or an error as process.py returns it."""
        assert self._rank is not None
        try:
            found = await asyncio.to_thread(self._rank.call, verb, {0: values}, limited=False)
        except BackendLost as error:
            return {"lost": str(error)}
        except (ValueError, OSError) as error:
            return error_answer(error)
        return {"found": found[0]}

    async def rank_memory(self) -> int:
        """Return the memory of its processes in bytes; 0 if the rank's process has ended."""
        if self._rank is None or any(has_ended(pid) for pid in self._rank.pids):
            return 0
        return await self.ping()

    async def end(self) -> None:
        """End the rank."""
        if self._rank is not None:
            await asyncio.to_thread(self._rank.close)


class RewardRole(Role):
    """A RewardPool. Requests and rewards travel as JSON text."""

    def __init__(self, context: RoleContext, rewards: RewardsConfig) -> None:
        super().__init__(context)
        self._functions: dict[str, dict[str, Any]] = {}
        self._pool = RewardPool(rewards, context.folder, self._packed)

    def _packed(self, spec: str) -> dict[str, Any]:
        """Return the controller's serialized function, else serialize it here."""
        function = self._functions.get(spec)
        if function is None:
            return packed(spec)
        if "refused" in function:
            raise ValueError(function["refused"])
        return function

    async def num_workers(self) -> int:
        """Return the number of concurrent calls."""
        return self._pool.config.num_processes

    async def score(self, requests: str, functions: Mapping[str, dict[str, Any]]) -> str:
        """Score requests. functions: serialized live objects, or {"refused": why}."""
        self._functions |= functions
        rewards = await self._pool.score([request_of(value) for value in json.loads(requests)])
        return json.dumps({"rewards": [reward.to_json() for reward in rewards], **self._known()})

    async def probe(self, task: str, functions: Mapping[str, dict[str, Any]]) -> str:
        """Return {"error": what is wrong with the function, or None}."""
        self._functions |= functions
        error = None
        try:
            await self._pool.probe(Task.from_json(json.loads(task)))
        except RewardProbeError as raised:
            error = str(raised)
        return json.dumps({"error": error, **self._known()})

    async def end(self) -> None:
        """Kill the workers."""
        await self._pool.close()

    def _known(self) -> dict[str, Any]:
        return {"counters": self._pool.counters(), "modes": dict(self._pool.modes)}


def request_to_json(request: ScoreRequest) -> list[Any]:
    """Return the request as JSON, for `request_of`."""
    rest = request.num_turns, asdict(request.trainer_state)
    return [request.task.to_json(), request.completion, list(request.completion_ids), *rest]


def request_of(value: list[Any]) -> ScoreRequest:
    """Return the request of `request_to_json`."""
    task, completion, ids, num_turns, state = value
    return ScoreRequest(Task.from_json(task), completion, tuple(ids), num_turns, TrainerState(**state))
