"""What runs on a node for a run: a server host, a rank, a reward pool, each in a process that some cluster has started.

Each ends with the process that started it, whatever happens to that: a cluster's daemon that is killed would leave its
processes behind, beside those that replace them. Knows no cluster; cluster/ray.py makes actors of these classes.
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
from rollover.trainer.ranks.local import LocalRanks
from rollover.trainer.ranks.process import error_answer
from rollover.types import Task

_LIBRARY_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # which a cluster sets to its own idea of a process


@dataclass(frozen=True)
class Place:
    """How a role finds what its controller has: the file of its output, the working directory, variables."""

    log: str
    folder: str
    environment: Mapping[str, str]

    @classmethod
    def of_this_process(cls, log: Path, gpus: str = "") -> Place:
        """For a role whose output goes to `log`, as this process has it. `gpus`: those that it sees; "": as the cluster
        says."""
        carried = ("HF_", "ROLLOVER_", "TOKENIZERS_", "GOMP_", "OMP_WAIT_", *_LIBRARY_THREADS)
        environment = {name: value for name, value in os.environ.items() if name.startswith(carried)}
        environment |= {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        return cls(str(log.absolute()), start_folder(), environment)


class Role:
    """What all roles have in common."""

    def __init__(self, place: Place) -> None:
        die_with(os.getppid())
        with contextlib.suppress(OSError):  # of another machine
            os.chdir(place.folder)
        for name in _LIBRARY_THREADS:
            os.environ.pop(name, None)
        os.environ.update(place.environment)
        os.makedirs(os.path.dirname(place.log), exist_ok=True)
        log = os.open(place.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)

    async def look(self) -> int:
        """Memory of this process and of all that it started, in bytes."""
        return resident_bytes(os.getpid())


class ServerRole(Role):
    """`rollover serve` in a child of this process, on `host`, with `server_token`: once."""

    def __init__(self, place: Place, config: Config, number: int, host: str, server_token: str) -> None:
        super().__init__(place)
        self._config, self._number, self._address, self._token = config, number, host, server_token
        self._logs = Path(place.log).parent  # where the server's own output goes, beside that of this process
        self._process: ProcessHost | None = None

    async def url(self, limit_s: float) -> dict[str, str]:
        """{"url"} when it answers, or {"failed": why}."""
        if self._process is None:  # in this thread: on Linux a child ends with the thread that started it
            self._process = ProcessHost(self._config, self._number, limit_s, self._logs, self._address, self._token)
        try:
            return {"url": await asyncio.to_thread(self._process.address, limit_s)}
        except ServerFailed as error:
            return {"failed": str(error)}

    async def end(self) -> None:
        """In order, so that it leaves nothing behind."""
        if self._process is not None:
            await self._process.close()


class RankRole(Role):
    """A rank of the trainer, in a child of this process."""

    def __init__(self, place: Place, config: Config, number: int, host: str) -> None:
        super().__init__(place)
        self._config, self._number, self._address = config, number, host
        self._logs = Path(place.log).parent
        self._rank: LocalRanks | None = None

    async def begin(self) -> None:
        """Start it."""
        backend, waiting = self._config.backend, brief_waiting(self._config.run)
        self._rank = LocalRanks(  # in this thread: on Linux a child ends with the thread that started it
            1, backend.rank_timeout_s, waiting, self._logs, host=self._address, first=self._number
        )

    async def call(self, verb: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the rank found, under "found"; {"lost": why}; or an error, as process.py answers it."""
        assert self._rank is not None
        try:
            found = await asyncio.to_thread(self._rank.call, verb, {0: values}, limited=False)
        except BackendLost as error:
            return {"lost": str(error)}
        except (ValueError, OSError) as error:
            return error_answer(error)
        return {"found": found[0]}

    async def lives(self) -> int:
        """Memory of its processes, in bytes; 0 where the rank's own has ended."""
        if self._rank is None or any(has_ended(pid) for pid in self._rank.pids):
            return 0
        return await self.look()

    async def end(self) -> None:
        """The rank ends."""
        if self._rank is not None:
            await asyncio.to_thread(self._rank.close)


class RewardRole(Role):
    """A RewardPool. What goes in and out is JSON, and text of JSON where it is long."""

    def __init__(self, place: Place, rewards: RewardsConfig) -> None:
        super().__init__(place)
        self._functions: dict[str, dict[str, Any]] = {}
        self._pool = RewardPool(rewards, place.folder, self._packed)

    def _packed(self, spec: str) -> dict[str, Any]:
        """As `travel.packed`, of a function that its program packed."""
        function = self._functions.get(spec)
        if function is None:
            return packed(spec)
        if "refused" in function:
            raise ValueError(function["refused"])
        return function

    async def num_workers(self) -> int:
        """As many calls it can be at."""
        return self._pool.config.num_processes

    async def score(self, requests: str, functions: Mapping[str, dict[str, Any]]) -> str:
        """`functions`: what travels for each that is an object of a program, or {"refused": why it cannot."""
        self._functions |= functions
        rewards = await self._pool.score([request_of(value) for value in json.loads(requests)])
        return json.dumps({"rewards": [reward.to_json() for reward in rewards], **self._known()})

    async def probe(self, task: str, functions: Mapping[str, dict[str, Any]]) -> str:
        """What is wrong with the function, if something is, under "error"."""
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
    """All of it, as `request_of` reads it."""
    rest = request.num_turns, asdict(request.trainer_state)
    return [request.task.to_json(), request.completion, list(request.completion_ids), *rest]


def request_of(value: list[Any]) -> ScoreRequest:
    """The request that `request_to_json` was asked of."""
    task, completion, ids, num_turns, state = value
    return ScoreRequest(Task.from_json(task), completion, tuple(ids), num_turns, TrainerState(**state))
