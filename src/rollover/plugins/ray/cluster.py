"""The roles of a run as Ray actors: servers, ranks and reward pools on the nodes that
cluster/assignment.py finds. The only importer of ray.

    controller, Ray's driver, ──▶ ActorHost        ──▶ ServerRole: `rollover serve` in a child of the actor
                              └─▶ ActorRewardNode  ──▶ RewardRole: a RewardPool

Without cluster.address a Ray of this machine is started, which listens on the loopback address alone and ends with this
process. An actor that ends is never restarted by Ray: who uses it (Fleet, MultiNodePool) starts another, on a node that
has room then. Ray carries what is asked and answered; weights and gradients never.

Owns the connection to Ray, and which role is on which node. Never decides when a role is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rollover.cluster.assignment import POOL, RANK, SERVER, Assignment
from rollover.cluster.plan import DoesNotFit, Needs, Node, devices_of_controller, many
from rollover.config import Config
from rollover.engine.protocol import EngineDied
from rollover.engine.remote.hosts import ServerHost
from rollover.models.threads import most_threads
from rollover.plugins.ray.address import no_cluster_at
from rollover.plugins.ray.hosted import CALL_S, ActorHost, ActorRewardNode, Gone
from rollover.plugins.ray.multi_node_pool import MultiNodePool
from rollover.plugins.ray.ranks import start_actor_ranks
from rollover.plugins.ray.roles import Place, Role
from rollover.plugins.ray.session import OwnSession
from rollover.processes import die_with
from rollover.rewards.protocol import ScoringPool
from rollover.trainer.ranks.group import Ranks

_STORE_BYTES = 100 * 2**20  # of the node that is started here; what is larger goes to disk
_LEAVE_S = 15.0
_NOTICES_DEATH = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class RayCluster:
    """A Cluster. See `open_cluster`. `logs`: the folder of what the roles print, on each node under this path."""

    def __init__(self, config: Config, logs: Path) -> None:
        if ray.is_initialized():  # and it is not ours to leave
            raise ValueError(
                'cluster.type = "ray": this process is connected to a Ray already. Call ray.shutdown() before, or start'
                " the run in a process of its own"
            )
        self.config, self.logs = config, logs
        self._session = None if config.cluster.address else OwnSession()
        self._actors: dict[str, RayActor] = {}  # by the name of the role
        self._finding = threading.Lock()  # ranks are started in threads
        try:
            _connect(config.cluster.address, self._session)
            alive = _alive()
            driver = ray.get_runtime_context().get_node_id()
            self._address = alive[driver]["NodeManagerAddress"]
            there = _with_gpus_of(alive.values(), config)
            self._assignment = Assignment(Needs.of(there), list(_nodes(alive).values()), driver)
            self._holders: list[Any] = []  # an actor ends with its handle
            # By node, what roles have in turns (cluster.colocate), the controller's first. Ray itself can only divide a
            # single GPU, and would give two halves of one to two servers.
            self._in_turns = {driver: self._hold_gpus(devices_of_controller(there), driver)}
        except BaseException:
            self._leave()
            raise

    # Builders ask for these

    def own_server(self, number: int) -> ServerHost:
        return ActorHost(self, number)

    @property
    def own_ranks(self) -> Callable[[], Ranks] | None:
        return self._start_ranks if self._assignment.needs.ranks else None

    def _start_ranks(self) -> Ranks:
        needs, at = self._assignment.needs, self._assignment.of
        most = max(Counter(node for name, node in at.items() if name.startswith(RANK)).values())
        device = "cuda:0" if needs.rank_gpus else "cpu"  # of those that a rank sees, the first
        return start_actor_ranks(self, [device] * needs.ranks, max(1, most_threads(self.config) // most))

    def reward_pool(self) -> ScoringPool | None:
        nodes = [ActorRewardNode(self, number) for number in range(self._assignment.needs.pools)]
        return MultiNodePool(self.config.rewards, nodes) if nodes else None

    def stats(self) -> dict[str, float]:
        sums: dict[str, float] = dict.fromkeys((SERVER, RANK, POOL), 0.0)
        for name, actor in list(self._actors.items()):
            sums[name.partition(" ")[0]] += actor.resident
        names = {SERVER: "servers", RANK: "ranks", POOL: "reward_nodes"}
        return {f"memory/{names[kind]}_rss_bytes": total for kind, total in sums.items()}

    async def close(self) -> None:
        for name in list(self._actors):
            self.end(name)
        self._leave()

    # Roles

    def start(self, name: str, role: type[Role], *arguments: Any) -> RayActor:
        """Start an actor of `role(place, *arguments)` on a node that has room; one of that name ends before. Gone if
        there is no such node."""
        self.end(name)
        node = self._node_of(name, self._there())
        gpus = {SERVER: self._assignment.needs.server_gpus, RANK: self._assignment.needs.rank_gpus}.get(
            name.partition(" ")[0], 0
        )
        visible = ""
        if gpus and self._assignment.needs.colocate:
            visible, gpus = self._gpus_in_turns(name, node), 0
        place = Place.of_this_process(self.logs / f"{name.replace(' ', '-')}.node.log", visible)
        self._actors[name] = RayActor(role, (place, *arguments), node, gpus)
        return self._actors[name]

    def end(self, name: str) -> None:
        """End the actor of this name at once, if there is one."""
        if (actor := self._actors.pop(name, None)) is not None:
            actor.kill()

    def address_of(self, name: str) -> str:
        """Return the address of the node that the role was last on. Gone if that is gone."""
        alive = self._there()
        return alive[self._node_of(name, alive)]["NodeManagerAddress"]

    def is_elsewhere(self, name: str) -> bool:
        """Return whether that is another machine than the controller's. Gone."""
        return self.address_of(name) != self._address

    def _node_of(self, name: str, alive: Mapping[str, Mapping[str, Any]]) -> str:
        try:
            with self._finding:
                return self._assignment.find(name, _nodes(alive))
        except DoesNotFit as error:
            raise Gone(f"no node has room for it: {error}") from error

    def _gpus_in_turns(self, name: str, node: str) -> str:
        """The GPUs of a server or rank, as CUDA_VISIBLE_DEVICES. Gone where others have them."""
        with self._finding:
            which, held = self._assignment.gpus(name), self._in_turns.setdefault(node, [])
            if (lacking := max(which.stop, self._assignment.gpus_on(node)) - len(held)) > 0:
                try:
                    held += self._hold(lacking, node)
                except ray.exceptions.RayError as error:
                    raise Gone(f"Ray has no {many(lacking, 'GPU')} left on its node") from error
            return ",".join(held[number] for number in which)

    def _hold(self, number: int, node: str) -> list[str]:
        """Take so many GPUs of a node from Ray, until the run ends. RayError where others have them."""
        where: Any = NodeAffinitySchedulingStrategy(node, soft=False)
        holder: Any = ray.remote(num_cpus=0, num_gpus=number, max_restarts=0, scheduling_strategy=where)(_Holder)
        actor = holder.remote()
        found = ray.get(actor.which.remote(), timeout=CALL_S)
        self._holders.append(actor)
        return found

    def _hold_gpus(self, numbers: set[str], driver: str) -> list[str]:
        """Those that the controller computes on, by their numbers among what it sees. ValueError if others have
        them."""
        if not numbers:
            return []
        seen = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        wanted = {seen[int(number)] if int(number) < len(seen) else number for number in numbers}
        try:
            found = self._hold(len(wanted), driver)
        except ray.exceptions.RayError as error:
            raise ValueError(f"Ray has no {many(len(wanted), 'GPU')} left for the controller on its node") from error
        if set(found) != wanted:
            raise ValueError(
                f"model.device and engine.device take GPU {', '.join(sorted(wanted))} of the controller's node, and Ray"
                f" has {', '.join(sorted(found))} to give: set them to those, or wait until whoever has the others has"
                " ended"
            )
        return found

    def _there(self) -> dict[str, dict[str, Any]]:
        """The nodes that live. EngineDied where none will ever again."""
        alive = _alive()
        if not alive and self._session is not None:
            raise EngineDied(f"the Ray that this run started has ended (what it wrote: {self.logs / 'ray'})")
        return alive

    def _leave(self) -> None:
        """In bounded time: a Ray of which a process is stopped, or cannot be reached, would be waited for for ever."""
        leaving = threading.Thread(target=ray.shutdown, daemon=True, name="ray.shutdown")
        leaving.start()
        leaving.join(_LEAVE_S)
        if self._session is not None:
            if leaving.is_alive():
                self._session.kill()
                leaving.join(_LEAVE_S)
            self._session.end(self.logs)


def _alive() -> dict[str, dict[str, Any]]:
    """What Ray says of its nodes, by their ids."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _address_of_driver() -> str:
    return _alive()[ray.get_runtime_context().get_node_id()]["NodeManagerAddress"]


def _nodes(alive: Mapping[str, Mapping[str, Any]]) -> dict[str, Node]:
    has = {name: node["Resources"] for name, node in alive.items()}
    return {name: Node(name, int(of.get("GPU", 0)), int(of.get("CPU", 0))) for name, of in has.items()}


def _with_gpus_of(nodes: Iterable[Mapping[str, Any]], config: Config) -> Config:
    """To plan with the GPUs that there are."""
    most = max(int(node["Resources"].get("GPU", 0)) for node in nodes)
    cluster = config.cluster.model_copy(update={"gpus_per_node": most})
    return config.model_copy(update={"cluster": cluster})


class _Holder:
    """Has GPUs of the controller's node, and does nothing: Ray gives what its driver takes to others."""

    def __init__(self) -> None:
        die_with(os.getppid())

    def which(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]


# The connection


def _connect(address: str, session: OwnSession | None) -> None:
    """Join the cluster at `address`, or start the one of `session`. ValueError where that cannot be.

    In the main thread: what Ray starts ends with the thread that started it.
    """
    # Or what a dying node had logged is printed here. In 2.60 there is no other way; who notices a loss tells of it.
    vars(importlib.import_module("ray._private.worker"))["_worker_logs_enabled"] = False
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    with _signals_kept(), _threads_kept():
        if session is None:
            try:
                ray.init(address=address, **common)
            except Exception as error:  # it has many for this, Exception itself among them
                raise ValueError(no_cluster_at(address, _first_line(error))) from error
            return
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _temp_dir=str(session.folder),
            _system_config=_NOTICES_DEATH,
            **common,
        )
    if not _address_of_driver().startswith("127."):
        raise ValueError(
            "ray was imported before the run: it would listen to other machines. Set the environment variable"
            " RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, or import rollover's run first"
        )


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


@contextlib.contextmanager
def _threads_kept() -> Iterator[None]:
    """Ray sets OMP_NUM_THREADS, which what this process starts would have."""
    before = os.environ.get("OMP_NUM_THREADS")
    yield
    if before is None:
        os.environ.pop("OMP_NUM_THREADS", None)


# Actors


class RayActor:
    """A role in a process of some node, which ends with this object's `kill`, or with its node. `resident`: bytes of
    memory that it had when that was last told."""

    def __init__(self, role: type[Role], arguments: tuple[Any, ...], node: str, gpus: int) -> None:
        self.resident = 0
        where: Any = NodeAffinitySchedulingStrategy(node, soft=False)
        actor: Any = ray.remote(num_cpus=0, num_gpus=gpus, max_restarts=0, scheduling_strategy=where)(role)
        try:
            self._handle: Any = actor.remote(*arguments)
        except ray.exceptions.RayError as error:
            raise Gone(_first_line(error)) from error

    def ask(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        """Return what the method returns, in any thread but that of an event loop. Gone."""
        try:
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=limit_s)
        except ray.exceptions.GetTimeoutError as error:
            raise Gone(f"it did not answer within {limit_s:g} s") from error
        except ray.exceptions.RayError as error:
            raise _gone(error) from error

    async def answer(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        """Return what the method returns. Gone; a call that is cancelled is cancelled there."""
        reference = None
        try:
            reference = getattr(self._handle, method).remote(*arguments)
            return await asyncio.wait_for(asyncio.wrap_future(reference.future()), limit_s)
        except TimeoutError as error:
            raise Gone(f"it did not answer within {limit_s:g} s") from error
        except asyncio.CancelledError:
            if reference is not None:
                ray.cancel(reference)
            raise
        except ray.exceptions.RayError as error:
            raise _gone(error) from error

    async def look(self) -> None:
        """Gone if it does not answer."""
        self.resident = await self.answer(CALL_S, "look")

    def kill(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._handle)


def _gone(error: BaseException) -> BaseException:
    """Errors of the role's own code stay what they are."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return error.as_instanceof_cause()
    return Gone(_first_line(error))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
