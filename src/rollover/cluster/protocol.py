"""Placement of the roles of a run: on this machine, or on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollover.config import Config
from rollover.config.cluster import CLUSTERS
from rollover.engine.remote.hosts import ServerHost
from rollover.functions import make_named
from rollover.rewards.protocol import ScoringPool
from rollover.trainer.ranks.group import Ranks


class Cluster(Protocol):
    """Hosts the parts of a run. Whoever uses a host closes it, before the cluster is closed."""

    @property
    def make_server_host(self) -> Callable[[int], ServerHost] | None:
        """Function from a server's number to its host; None: processes of this machine."""
        ...

    @property
    def make_ranks(self) -> Callable[[], Ranks] | None:
        """Function that starts connected ranks; None: processes of this machine."""
        ...

    def reward_pool(self) -> ScoringPool | None:
        """Return the reward workers; None: processes of this machine."""
        ...

    def stats(self) -> dict[str, float]:
        """Return gauges of the roles."""
        ...

    async def close(self) -> None:
        """Disconnect; what is left of the run on the cluster ends."""
        ...


@dataclass(frozen=True)
class ClusterSetup:
    """Arguments of a cluster. `logs`: the folder of the roles' output; None: it is not kept."""

    config: Config
    logs: Path | None


class ThisMachine:
    """A Cluster whose roles are child processes of this process."""

    make_server_host = make_ranks = None

    def reward_pool(self) -> ScoringPool | None:
        return None

    def stats(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Do nothing."""


def this_machine(setup: ClusterSetup) -> Cluster:
    return ThisMachine()


def open_cluster(setup: ClusterSetup) -> Cluster:
    """Return the cluster that cluster.type names. ValueError where a library is missing, there is no cluster at the
    address, or the roles do not fit on its nodes; FunctionError where a custom function gives no cluster."""
    return make_named("cluster.type", setup.config.cluster.type, CLUSTERS, setup, Cluster, "a cluster")
