"""On Ray no role gets a GPU of the controller's node on which the controller itself computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import environment
from ray_nodes import RayNodes

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SEES = """
import json, os, sys
from pathlib import Path
from rollover.cluster.build import open_cluster
from rollover.cluster.roles import Role
from rollover.config import Config

class Sees(Role):
    async def gpus(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

if __name__ == "__main__":
    address, folder = sys.argv[1:]
    cluster = open_cluster(Config.model_validate({
        "model": {"device": "cuda"}, "cluster": {"type": "ray", "address": address},
        "engine": {"kind": "remote", "server": "vllm", "num_servers": 2},
    }), Path(folder))
    print(json.dumps([cluster.start(f"server {i}", Sees).ask(60, "gpus") for i in range(2)]))
"""


def test_servers_get_the_gpus_that_the_controller_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "sees.py").write_text(SEES)
    with RayNodes(2, gpus=3) as nodes:
        variables = environment() | {"PYTHONPATH": f"{tmp_path}:{environment().get('PYTHONPATH', '')}"}
        command = [sys.executable, str(tmp_path / "sees.py"), nodes.address, str(tmp_path)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(done.stdout.splitlines()[-1])) == ["1", "2"], "GPU 0 is the trainer's"
