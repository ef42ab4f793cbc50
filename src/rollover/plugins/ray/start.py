"""Starts Ray, or connects to it, for cluster.type = "ray"."""

from __future__ import annotations

import os
from pathlib import Path

from rollover.cluster.protocol import Cluster, ClusterSetup
from rollover.config.cluster import host_and_port
from rollover.plugins.ray.address import check_listens


def open_ray(setup: ClusterSetup) -> Cluster:
    """Start or join a Ray cluster. ValueError if ray is missing, nothing answers, or the roles do not fit."""
    # Ray reads these at import. Without the first it listens on all interfaces.
    address = setup.config.cluster.address
    host = host_and_port(address)[0] if address else "localhost"
    if host == "localhost" or host.startswith("127."):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if address:
        # Ray retries an address without an answer for 15 minutes; with this a silent one takes one attempt of 40 s.
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
        check_listens(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 starves roles on a busy machine
    try:
        from rollover.plugins.ray.cluster import RayCluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ValueError('cluster.type = "ray" needs ray: pip install "rollover[ray]"') from error
    return RayCluster(setup.config, setup.logs or Path(setup.config.run.dir) / "logs")
