"""The roles of a run as Ray actors: servers, ranks and reward pools on the nodes that
cluster/plan.py finds. The only importer of ray.

    controller, Ray's driver, ──▶ ActorHost        ──▶ ServerRole: `rollover serve` in a child of the actor
                              └─▶ ActorRewardNode  ──▶ RewardRole: a RewardPool

Without cluster.address a Ray of this machine is started, which listens on the loopback address alone and ends with this
process. Ray never restarts an actor: its user (Fleet, MultiNodePool) starts another one on a node with room. Ray
carries requests and answers, but no weights and gradients.

Owns the connection to Ray, and the assignment of roles to nodes. Does not decide when a role has failed.
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
from rollover.cluster.plan import POOL, RANK, SERVER, Assignment, DoesNotFit, Needs, Node, devices_of_controller, many
from rollover.config import Config
from rollover.engine.protocol import EngineDied
from rollover.engine.remote.hosts import ServerHost
from rollover.models.threads import most_threads
from rollover.plugins.ray.address import no_cluster_at
from rollover.plugins.ray.controller import CALL_S, ActorFailed, ActorHost, ActorRewardNode, start_actor_ranks
from rollover.plugins.ray.multi_node_pool import MultiNodePool
from rollover.plugins.ray.roles import Role, RoleContext
from rollover.plugins.ray.session import LocalRay
from rollover.processes import die_with
from rollover.rewards.protocol import ScoringPool
from rollover.trainer.ranks.group import Ranks

_STORE_BYTES = 100 * 2**20  # object store of the local node; larger objects go to disk
_SHUTDOWN_S = 15.0
_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class RayCluster:
    """A Cluster. See `open_cluster`. `logs`: the folder of the roles' output, under this path on each node."""

    def __init__(self, config: Config, logs: Path) -> None:
        if ray.is_initialized():
            raise ValueError(
                'cluster.type = "ray": this process is connected to a Ray already. Call ray.shutdown() before, or start'
                " the run in a process of its own"
            )
        self.config, self.logs = config, logs
        self._session = None if config.cluster.address else LocalRay()
        self._actors: dict[str, RayActor] = {}  # by the name of the role
        self._finding = threading.Lock()  # ranks are started in threads
        try:
            _connect(config.cluster.address, self._session)
            alive = _ray_nodes()
            driver = ray.get_runtime_context().get_node_id()
            self._address = alive[driver]["NodeManagerAddress"]
            there = _with_gpus_per_node(alive.values(), config)
            self._assignment = Assignment(Needs.from_config(there), list(_nodes(alive).values()), driver)
            self._holders: list[Any] = []  # an actor ends with its handle
            # GPUs that roles share in turns (cluster.colocate), by node, the controller's first. Ray can only divide
            # single GPUs, and would give two halves of one to two servers.
            self._shared_gpus = {driver: self._reserve_controller_gpus(devices_of_controller(there), driver)}
        except BaseException:
            self._shut_down()
            raise

    # Builders ask for these

    def make_server_host(self, number: int) -> ServerHost:
        return ActorHost(self, number)

    @property
    def make_ranks(self) -> Callable[[], Ranks] | None:
        return self._start_ranks if self._assignment.needs.ranks else None

    def _start_ranks(self) -> Ranks:
        needs, at = self._assignment.needs, self._assignment.node_of
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
        self._shut_down()

    # Roles

    def start(self, name: str, role: type[Role], *arguments: Any) -> RayActor:
        """Start an actor of `role(context, *arguments)` on a node with room, after ending one of that name.

        Raises ActorFailed if there is no such node.
        """
        self.end(name)
        node = self._node_of(name, self._alive_nodes())
        gpus = {SERVER: self._assignment.needs.server_gpus, RANK: self._assignment.needs.rank_gpus}.get(
            name.partition(" ")[0], 0
        )
        visible = ""
        if gpus and self._assignment.needs.colocate:
            visible, gpus = self._take_shared_gpus(name, node), 0
        context = RoleContext.from_this_process(self.logs / f"{name.replace(' ', '-')}.node.log", visible)
        self._actors[name] = RayActor(role, (context, *arguments), node, gpus)
        return self._actors[name]

    def end(self, name: str) -> None:
        """Kill the actor of this name, if any."""
        if (actor := self._actors.pop(name, None)) is not None:
            actor.kill()

    def address_of(self, name: str) -> str:
        """Return the address of the role's last node. Raises ActorFailed if the node has failed."""
        alive = self._alive_nodes()
        return alive[self._node_of(name, alive)]["NodeManagerAddress"]

    def is_remote(self, name: str) -> bool:
        """Return whether the role is on another machine than the controller. Raises ActorFailed."""
        return self.address_of(name) != self._address

    def _node_of(self, name: str, alive: Mapping[str, Mapping[str, Any]]) -> str:
        try:
            with self._finding:
                return self._assignment.find(name, _nodes(alive))
        except DoesNotFit as error:
            raise ActorFailed(f"no node has room for it: {error}") from error

    def _take_shared_gpus(self, name: str, node: str) -> str:
        """Return the shared GPUs of a server or rank, as CUDA_VISIBLE_DEVICES. ActorFailed if Ray has none left."""
        with self._finding:
            which, held = self._assignment.gpus(name), self._shared_gpus.setdefault(node, [])
            if (lacking := max(which.stop, self._assignment.gpus_on(node)) - len(held)) > 0:
                try:
                    held += self._reserve_gpus(lacking, node)
                except ray.exceptions.RayError as error:
                    raise ActorFailed(f"Ray has no {many(lacking, 'GPU')} left on its node") from error
            return ",".join(held[number] for number in which)

    def _reserve_gpus(self, number: int, node: str) -> list[str]:
        """Reserve GPUs of a node in Ray until the run ends. RayError if none are left."""
        where: Any = NodeAffinitySchedulingStrategy(node, soft=False)
        holder: Any = ray.remote(num_cpus=0, num_gpus=number, max_restarts=0, scheduling_strategy=where)(_GpuHolder)
        actor = holder.remote()
        found = ray.get(actor.which.remote(), timeout=CALL_S)
        self._holders.append(actor)
        return found

    def _reserve_controller_gpus(self, numbers: set[str], driver: str) -> list[str]:
        """Reserve the controller's GPUs, by their numbers among its visible ones. ValueError if Ray has other ones."""
        if not numbers:
            return []
        seen = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        wanted = {seen[int(number)] if int(number) < len(seen) else number for number in numbers}
        try:
            found = self._reserve_gpus(len(wanted), driver)
        except ray.exceptions.RayError as error:
            raise ValueError(f"Ray has no {many(len(wanted), 'GPU')} left for the controller on its node") from error
        if set(found) != wanted:
            raise ValueError(
                f"model.device and engine.device take GPU {', '.join(sorted(wanted))} of the controller's node, and Ray"
                f" has {', '.join(sorted(found))} to give: set them to those, or wait until whoever has the others has"
                " ended"
            )
        return found

    def _alive_nodes(self) -> dict[str, dict[str, Any]]:
        """Return the running nodes. EngineDied if the local Ray has ended."""
        alive = _ray_nodes()
        if not alive and self._session is not None:
            raise EngineDied(f"the Ray that this run started has ended (what it wrote: {self.logs / 'ray'})")
        return alive

    def _shut_down(self) -> None:
        """Shut ray down within a timeout: it would wait forever for a stopped or unreachable process."""
        leaving = threading.Thread(target=ray.shutdown, daemon=True, name="ray.shutdown")
        leaving.start()
        leaving.join(_SHUTDOWN_S)
        if self._session is not None:
            if leaving.is_alive():
                self._session.kill()
                leaving.join(_SHUTDOWN_S)
            self._session.end(self.logs)


def _ray_nodes() -> dict[str, dict[str, Any]]:
    """Return Ray's running nodes by id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _address_of_driver() -> str:
    return _ray_nodes()[ray.get_runtime_context().get_node_id()]["NodeManagerAddress"]


def _nodes(alive: Mapping[str, Mapping[str, Any]]) -> dict[str, Node]:
    has = {name: node["Resources"] for name, node in alive.items()}
    return {name: Node(name, int(of.get("GPU", 0)), int(of.get("CPU", 0))) for name, of in has.items()}


def _with_gpus_per_node(nodes: Iterable[Mapping[str, Any]], config: Config) -> Config:
    """Set cluster.gpus_per_node to the GPUs found."""
    most = max(int(node["Resources"].get("GPU", 0)) for node in nodes)
    cluster = config.cluster.model_copy(update={"gpus_per_node": most})
    return config.model_copy(update={"cluster": cluster})


class _GpuHolder:
    """An actor that reserves GPUs: Ray would give the driver's GPUs to others."""

    def __init__(self) -> None:
        die_with(os.getppid())

    def which(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]


# The connection


def _connect(address: str, session: LocalRay | None) -> None:
    """Join the cluster at `address`, or start the local one of `session`. ValueError on failure.

    Call in the main thread: Ray's processes end with the thread that started them.
    """
    # Otherwise logs of a dying node are printed here. Ray 2.60 has no public option for it.
    vars(importlib.import_module("ray._private.worker"))["_worker_logs_enabled"] = False
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    with _keep_signals(), _keep_thread_settings():
        if session is None:
            try:
                ray.init(address=address, **common)
            except Exception as error:  # Ray raises many types here, even Exception itself
                raise ValueError(no_cluster_at(address, _first_line(error))) from error
            return
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _temp_dir=str(session.folder),
            _system_config=_HEALTH_CHECKS,
            **common,
        )
    if not _address_of_driver().startswith("127."):
        raise ValueError(
            "ray was imported before the run: it would listen to other machines. Set the environment variable"
            " RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, or import rollover's run first"
        )


@contextlib.contextmanager
def _keep_signals() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


@contextlib.contextmanager
def _keep_thread_settings() -> Iterator[None]:
    """Remove OMP_NUM_THREADS, which Ray sets and child processes would inherit."""
    before = os.environ.get("OMP_NUM_THREADS")
    yield
    if before is None:
        os.environ.pop("OMP_NUM_THREADS", None)


# Actors


class RayActor:
    """See `Actor`. It ends by `kill`, or with its node."""

    def __init__(self, role: type[Role], arguments: tuple[Any, ...], node: str, gpus: int) -> None:
        self.resident = 0
        where: Any = NodeAffinitySchedulingStrategy(node, soft=False)
        actor: Any = ray.remote(num_cpus=0, num_gpus=gpus, max_restarts=0, scheduling_strategy=where)(role)
        try:
            self._handle: Any = actor.remote(*arguments)
        except ray.exceptions.RayError as error:
            raise ActorFailed(_first_line(error)) from error

    def call(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=limit_s)
        except ray.exceptions.GetTimeoutError as error:
            raise ActorFailed(f"it did not answer within {limit_s:g} s") from error
        except ray.exceptions.RayError as error:
            raise _gone(error) from error

    async def call_async(self, limit_s: float | None, method: str, *arguments: Any) -> Any:
        reference = None
        try:
            reference = getattr(self._handle, method).remote(*arguments)
            return await asyncio.wait_for(asyncio.wrap_future(reference.future()), limit_s)
        except TimeoutError as error:
            raise ActorFailed(f"it did not answer within {limit_s:g} s") from error
        except asyncio.CancelledError:
            if reference is not None:
                ray.cancel(reference)
            raise
        except ray.exceptions.RayError as error:
            raise _gone(error) from error

    async def ping(self) -> None:
        self.resident = await self.call_async(CALL_S, "ping")

    def kill(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._handle)


def _gone(error: BaseException) -> BaseException:
    """Return the exception of the role's code, or ActorFailed."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return error.as_instanceof_cause()
    return ActorFailed(_first_line(error))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
