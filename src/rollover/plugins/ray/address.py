"""A quick check of the cluster's address, before ray connects to it."""

from __future__ import annotations

import socket

from rollover.config.cluster import host_and_port

_ANSWERS_S = 10.0


def check_listens(address: str) -> None:
    """Raise ValueError if nothing listens at `address` (host:port)."""
    try:
        socket.create_connection(host_and_port(address), _ANSWERS_S).close()
    except OSError as error:
        raise ValueError(no_cluster_at(address, error.strerror or str(error))) from error


def no_cluster_at(address: str, why: str) -> str:
    """Return the error message for an address without a cluster."""
    return (
        f"cluster.address = {address!r}: no cluster answers there ({why}). Start one by `ray start --head`, or remove"
        " the key: a Ray of this machine is started then"
    )
