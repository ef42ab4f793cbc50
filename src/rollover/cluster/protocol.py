"""Where the roles of a run are: on this machine, or on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rollover import registry
from rollover.config import Config
from rollover.engine.remote.hosts import Host
from rollover.rewards.protocol import ScoringPool
from rollover.trainer.ranks.group import Ranks


class Cluster(Protocol):
    """Gives builders what their parts run in. Whoever uses one of these ends it, before the cluster is closed."""

    @property
    def own_server(self) -> Callable[[int], Host] | None:
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


class ThisMachine:
    """A Cluster where everything is a child of this process."""

    own_server = own_ranks = None

    def reward_pool(self) -> ScoringPool | None:
        return None

    def stats(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Nothing."""


def open_cluster(config: Config, logs: Path | None) -> Cluster:
    """The cluster that cluster.type names. `logs`: the folder of what the roles print. ValueError where a library is
    missing, there is no cluster at the address, or the roles do not fit on its nodes."""
    if config.cluster.type == "none":
        return ThisMachine()
    return registry.load("clusters", config.cluster.type)(config, logs)
