"""The cluster of a run, by cluster.type."""

from __future__ import annotations

import os
from pathlib import Path

from rollover.cluster.protocol import Cluster, ThisMachine
from rollover.config import Config


def open_cluster(config: Config, logs: Path | None) -> Cluster:
    """`logs`: the folder of what the roles print. ValueError where a library is missing, there is no cluster at the
    address, or the roles do not fit on its nodes."""
    if config.cluster.type == "none":
        return ThisMachine()
    # Read when ray is imported. Without the first it listens to all machines.
    host = config.cluster.address.rpartition(":")[0]
    if not host or host == "localhost" or host.startswith("127."):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        from rollover.cluster.ray import RayCluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ValueError('cluster.type = "ray" needs ray: pip install "rollover[ray]"') from error
    return RayCluster(config, logs or Path(config.run.dir) / "logs")
