"""Starts Ray, or connects to it, for cluster.type = "ray"."""

from __future__ import annotations

import os
from pathlib import Path

from rollover.cluster.protocol import Cluster, ClusterSetup
from rollover.config.cluster import host_and_port
from rollover.plugins.ray.address import check_listens


def open_ray(setup: ClusterSetup) -> Cluster:
    """ValueError where ray is missing, there is no cluster at the address,
    or the roles do not fit on its nodes."""
    # Read when ray is imported. Without the first it listens to all machines.
    address = setup.config.cluster.address
    host = host_and_port(address)[0] if address else "localhost"
    if host == "localhost" or host.startswith("127."):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if address:
        # Ray asks an address that nobody answers for a quarter of an hour, and one that is silent as well: with this
        # the latter takes one attempt of 40 s.
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
        check_listens(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves roles where anything else computes
    try:
        from rollover.plugins.ray.cluster import RayCluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ValueError('cluster.type = "ray" needs ray: pip install "rollover[ray]"') from error
    return RayCluster(setup.config, setup.logs or Path(setup.config.run.dir) / "logs")
