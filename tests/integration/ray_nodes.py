"""A Ray cluster of several nodes on this machine, in a process of its own, whose nodes a test adds and kills.

    with RayNodes(cpus_of_head) as nodes:
        node = nodes.add(cpus=2)      its raylet, and all that this started, end by `node.kill()`

It listens on the loopback address alone, and notices a death within two seconds. Nothing of it is left at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil
from launcher import environment

_NOTICES_DEATH = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class RayNode:
    """`raylet`: the process from which all roles of the node descend."""

    def __init__(self, raylet: int) -> None:
        self.raylet = raylet

    def processes(self) -> list[psutil.Process]:
        """It and all that descends from it."""
        return descendants(self.raylet)

    def kill(self) -> None:
        """All of its processes, at once."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def kill_raylet(self) -> None:
        os.kill(self.raylet, signal.SIGKILL)


class RayNodes:
    def __init__(self, cpus: int, gpus: int = 0) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rn-", dir="/tmp")
        os.mkdir(os.path.join(self._folder.name, "ray"))
        variables = environment() | {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": self._folder.name,  # else others would find it by /tmp/ray/ray_current_cluster
        }
        self._log = open(os.path.join(self._folder.name, "log"), "w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.head = self.add(cpus, gpus)
        self.address = self._ask({"op": "address"})["address"]

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        left = descendants(self._process.pid)
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def add(self, cpus: int, gpus: int = 0) -> RayNode:
        """A node more, when the others know it. `gpus`: so many as it says that it has."""
        return RayNode(self._ask({"op": "add", "cpus": cpus, "gpus": gpus})["raylet"])

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise AssertionError(self._log.read().decode(errors="replace"))
        return json.loads(line)


def descendants(pid: int) -> list[psutil.Process]:
    """The process and all that descends from it, as far as they live."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def listening(processes: list[psutil.Process]) -> set[str]:
    """The addresses at which these processes can be asked."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return found


def wait_until(what: Callable[[], object], seconds: float, why: str | Callable[[], str]) -> None:
    """Until it is so; else an AssertionError that says why it should be."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, why if isinstance(why, str) else why()
        time.sleep(0.1)


def main() -> None:
    from ray.cluster_utils import Cluster

    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cluster = Cluster()
    try:
        for line in sys.stdin:
            message = json.loads(line)
            if message["op"] == "address":
                answer: dict[str, Any] = {"address": cluster.address}
            else:
                first = cluster.head_node is None
                only_head = {"_system_config": _NOTICES_DEATH, "include_dashboard": False}
                node = cluster.add_node(
                    num_cpus=message["cpus"],
                    num_gpus=message["gpus"],
                    object_store_memory=80 * 2**20,
                    **(only_head if first else {}),
                )
                [raylet] = node.all_processes["raylet"]
                answer = {"raylet": raylet.process.pid}
            print(json.dumps(answer), file=said, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
