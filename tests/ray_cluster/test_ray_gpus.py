"""On Ray no role gets a GPU of the controller's node on which the controller itself computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher import environment
from ray_nodes import RayNodes

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SEES = """
import json, os, sys
from pathlib import Path
from rollover.cluster.protocol import ClusterSetup, open_cluster
from rollover.plugins.ray.roles import Role
from rollover.config import Config

class Sees(Role):
    async def gpus(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

if __name__ == "__main__":
    address, folder, tables, *names = sys.argv[1:]
    cluster = open_cluster(ClusterSetup(Config.model_validate({
        "model": {"device": "cuda"}, "cluster": {"type": "ray", "address": address, **json.loads(tables)["cluster"]},
        "engine": {"kind": "remote", "server": "vllm", **json.loads(tables)["engine"]},
        "backend": json.loads(tables).get("backend", {}),
    }), Path(folder)))
    print(json.dumps({name: cluster.start(name, Sees).call(60, "gpus") for name in names}))
"""


def seen(folder: Path, gpus: int, names: list[str], **tables: dict[str, Any]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each of these roles, on one node."""
    (folder / "sees.py").write_text(SEES)
    with RayNodes(2, gpus=gpus) as nodes:
        variables = environment() | {"PYTHONPATH": f"{folder}:{environment().get('PYTHONPATH', '')}"}
        command = [sys.executable, str(folder / "sees.py"), nodes.address, str(folder), json.dumps(tables), *names]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_servers_get_the_gpus_that_the_controller_does_not_use(tmp_path: Path) -> None:
    found = seen(tmp_path, 3, ["server 0", "server 1"], cluster={}, engine={"num_servers": 2})
    assert sorted(found.values()) == ["1", "2"], "GPU 0 is the trainer's"


def test_ray_colocate_gives_ranks_and_servers_the_same_gpus(tmp_path: Path) -> None:
    """Four GPUs are enough for four ranks and two servers of two; a server that starts again has its own."""
    names = ["server 0", "server 1", "rank 0", "rank 1", "rank 2", "rank 3", "server 0"]
    cluster, backend = {"colocate": True, "gpus_per_server": 2}, {"type": "ranks", "num_ranks": 4}
    found = seen(tmp_path, 4, names, cluster=cluster, engine={"num_servers": 2}, backend=backend)
    assert sorted(found[f"rank {i}"] for i in range(4)) == ["0", "1", "2", "3"]
    assert sorted(found[f"server {i}"] for i in range(2)) == ["0,1", "2,3"]
