"""Where the roles of a run are: on this machine, or on the nodes of a cluster."""

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
    """Gives builders what their parts run in. Whoever uses one of these ends it, before the cluster is closed."""

    @property
    def own_server(self) -> Callable[[int], ServerHost] | None:
        """Makes the host of each server that the run starts, by its number; None: processes of this machine."""
        ...

    @property
    def own_ranks(self) -> Callable[[], Ranks] | None:
        """Starts ranks that have met; None: processes of this machine."""
        ...

    def reward_pool(self) -> ScoringPool | None:
        """The workers that score; None: processes of this machine."""
        ...

    def stats(self) -> dict[str, float]:
        """Gauges of the roles."""
        ...

    async def close(self) -> None:
        """Leave it: what is left of the run there ends."""
        ...


@dataclass(frozen=True)
class ClusterSetup:
    """What a cluster is made from. `logs`: the folder of what the roles print; None: it has none that stays."""

    config: Config
    logs: Path | None


class ThisMachine:
    """A Cluster where everything is a child of this process."""

    own_server = own_ranks = None

    def reward_pool(self) -> ScoringPool | None:
        return None

    def stats(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Nothing."""


def this_machine(setup: ClusterSetup) -> Cluster:
    return ThisMachine()


def open_cluster(setup: ClusterSetup) -> Cluster:
    """Return the cluster that cluster.type names. ValueError where a library is missing, there is no cluster at the
    address, or the roles do not fit on its nodes; FunctionError where a custom function gives no cluster."""
    return make_named("cluster.type", setup.config.cluster.type, CLUSTERS, setup, Cluster, "a cluster")
