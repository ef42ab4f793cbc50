"""A cluster's address that nobody answers is told at once, not after the quarter of an hour that Ray asks for."""

from __future__ import annotations

import socket
import time

import pytest

from rollover.cluster.protocol import ClusterSetup, open_cluster
from rollover.config import Config


def at(address: str) -> Config:
    return Config.model_validate({"cluster": {"type": "ray", "address": address}})


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
def test_address_without_listener_fails_at_once(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_gcs_server_port_wait_time_s"):
        monkeypatch.setenv(name, "1")  # what is set for Ray is gone after this test
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        address = f"{host}:{taken.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"cluster\.address = .*: no cluster answers there .*`ray start --head`"):
            open_cluster(ClusterSetup(at(address), None))
    assert time.monotonic() - began < 60
