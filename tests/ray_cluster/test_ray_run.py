"""Runs on Ray: nodes that die and come cost no rollout, and when a run ends, however it ends, nothing of it is left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import runs
from ray_nodes import RayNode, RayNodes, descendants, listening, lives, wait_until
from runs import check_whole

from rollover.config import Config

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.ray

LIMIT_S = 200  # more than any machine takes
GONE_S = 10
SERVER, RANK, POOL = "ray::ServerRole", "ray::RankRole", "ray::RewardRole"


def recipe(folder: Path, address: str) -> Path:
    """Two servers, two ranks and a reward pool, which fit on nodes of 2, 2 and 3 CPUs; or, without an address, two
    servers and a pool that fit on any machine. More steps than anyone waits for."""
    cluster = {"type": "ray"} | ({"address": address, "cpus_per_process": 1} if address else {})
    return runs.write(
        folder,
        steps=5000,
        rows=50_000,
        engine={"kind": "remote", "num_servers": 2, "max_running": 4, "server_timeout_s": 20},
        rollout={"interrupt": "on_weight_update", "overlap": True, "max_new_tokens": 96},
        checkpoint={"save_final_model": False, "every_steps": 20, "keep": 2},
        rewards={"function": f"{folder / 'reward.py'}:reward", "num_workers": 3 if address else 1},
        cluster=cluster,
        **({"backend": {"type": "ranks", "num_ranks": 2}} if address else {}),
    )


class Training:
    """A run under way. `rows()` of its metrics."""

    def __init__(self, folder: Path, address: str = "") -> None:
        self.folder, self.dir = folder, folder / "run"
        self.shared = set(os.listdir("/dev/shm"))
        self.process = runs.start("train", recipe(folder, address), log=folder / "log")
        self.seen: dict[int, psutil.Process] = {}

    def rows(self) -> list[dict[str, Any]]:
        return runs.json_lines(self.dir / "metrics.jsonl")

    def said(self) -> str:
        """All but what each step says."""
        lines = (self.folder / "log").read_text().splitlines()
        return "\n".join(line for line in lines if not line.startswith(("step ", "checkpoint ")))

    def trains(self, more: int = 2, *, key: str = "", above: float = 0) -> None:
        """Until it has made so many more steps, and a metric is above."""
        first = len(self.rows())

        def has() -> bool:
            assert self.process.poll() is None, self.said()
            rows = self.rows()
            return len(rows) >= first + more and (not key or rows[-1][key] > above)

        wait_until(has, LIMIT_S, lambda: f"it trains no more {key}: {self.said()}")

    def look(self, *nodes: RayNode) -> list[psutil.Process]:
        """Its processes, now and before: those of the command, and its roles on these nodes."""
        found = descendants(self.process.pid)
        for node in nodes:
            found += [p for p in node.processes() if is_of_the_run(p)]
        self.seen |= {process.pid: process for process in found}
        return found

    def nothing_is_left(self) -> None:
        """No process that was ever seen, nor a file in shared memory."""

        def left() -> list[str]:
            files = [
                name
                for name in set(os.listdir("/dev/shm")) - self.shared
                if "rollover" in name and "weights" not in name
            ]
            return [*(f"{p.pid} {command(p)}" for p in self.seen.values() if lives(p)), *files]

        wait_until(lambda: not left(), GONE_S, lambda: "left: " + "; ".join(left()))

    def end(self) -> None:
        """By Ctrl-C, in order."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(LIMIT_S) == 130, self.said()
        check_whole(self.dir, len(self.rows()))

    def goes_on(self) -> None:
        """Ended, it makes two more steps by --resume."""
        steps = len(self.rows())
        words = [self.folder / "recipe.toml", f"--run.dir={self.dir}", "--resume", f"--train.num_steps={steps + 2}"]
        again = runs.rollover("train", *words)
        assert again.returncode == 0, again.stderr
        check_whole(self.dir, steps + 2)


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_of_the_run(process: psutil.Process) -> bool:
    """A role's, or one that runs a module of the package: its name may be in the path of any program, Ray's own too."""
    said = command(process)
    return any(role in said for role in (SERVER, RANK, POOL)) or bool(re.search(r" -m rollover(\.\w+)*( |$)", said))


def roles_on(node: RayNode) -> set[str]:
    return {role for role in (SERVER, RANK, POOL) for p in node.processes() if role in command(p)}


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    """The head is the controller's, and has no room for anything else."""
    with RayNodes(0) as found:
        yield found


def test_nodes_that_die_are_replaced_by_others_and_nothing_is_lost(nodes: RayNodes, tmp_path: Path) -> None:
    """All processes of the servers' node, of the ranks', of the reward node, and a raylet alone; each time a node is
    added."""
    for_servers, for_ranks, for_rewards = nodes.add(2), nodes.add(2), nodes.add(3)
    training = Training(tmp_path, nodes.address)
    try:
        training.trains(key="engine/servers", above=1)
        if roles_on(for_servers) == {RANK}:
            for_servers, for_ranks = for_ranks, for_servers
        assert [roles_on(node) for node in (for_servers, for_ranks, for_rewards)] == [{SERVER}, {RANK}, {POOL}]
        training.look(for_servers, for_ranks, for_rewards)

        for_servers.kill()
        for_servers = nodes.add(2)
        training.trains(key="engine/ejections", above=1)
        training.trains(key="engine/servers", above=1)
        training.look(for_servers)

        for_ranks.kill()
        for_ranks = nodes.add(2)
        training.trains(key="train/restarts")
        training.look(for_ranks)

        for_rewards.kill()
        for_rewards = nodes.add(3)
        training.trains(key="rewards/lost_nodes")
        training.look(for_rewards)

        before = training.look(for_servers)
        for_servers.kill_raylet()
        roles = [p for p in before if SERVER in command(p)]
        wait_until(lambda: not any(lives(p) for p in roles), GONE_S, "an actor outlives its raylet")
        for_servers = nodes.add(2)
        training.trains(key="engine/ejections", above=3)
        training.trains(key="engine/servers", above=1)
        assert [roles_on(node) for node in (for_servers, for_ranks, for_rewards)] == [{SERVER}, {RANK}, {POOL}]
        assert listening(training.look(for_servers, for_ranks, for_rewards)) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        training.end()
        training.nothing_is_left()
        row = training.rows()[-1]
        assert all(row[f"memory/{who}_rss_bytes"] > 1e8 for who in ("servers", "ranks", "reward_nodes"))
        assert row["engine/span_mismatches"] == 0 and row["rewards/crashes"] == 0 and row["rewards/errors"] == 0
        logs = {path.name for path in (training.dir / "logs").iterdir()}
        assert {"server-0.log", "server-1.log", "rank-0.log", "rank-1.log", "reward-0.node.log"} <= logs
        assert "raylet" not in training.said()
    finally:
        training.process.kill()


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "own"])
def test_a_driver_that_is_killed_leaves_nothing(joined: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    address, there = "", []
    if joined:
        nodes = request.getfixturevalue("nodes")
        address, there = nodes.address, [nodes.add(2), nodes.add(2), nodes.add(3)]
    training = Training(tmp_path, address)
    try:
        training.trains(2)
        found = training.look(*there)
        assert sum("serve" in command(p) for p in found) >= 2
        assert listening(found) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"} and listening(found)
        training.process.kill()
        training.process.wait(LIMIT_S)
        training.nothing_is_left()
    finally:
        training.process.kill()


def test_a_run_on_a_ray_of_its_own_ends_by_ctrl_c(tmp_path: Path) -> None:
    training = Training(tmp_path)
    try:
        training.trains(2)
        training.look()
        began = time.monotonic()
        training.end()
        training.nothing_is_left()
        assert time.monotonic() - began < LIMIT_S
        assert (training.dir / "logs" / "ray").is_dir() and not list(Path("/tmp").glob(f"*-{training.process.pid}"))
    finally:
        training.process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_run_whose_own_ray_dies_ends_and_goes_on(number: int, tmp_path: Path) -> None:
    """Nobody can give that one another node."""
    training = Training(tmp_path)
    try:
        training.trains(2)
        [raylet] = [p for p in training.look() if command(p).split()[0].endswith("/raylet")]
        raylet.send_signal(number)
        assert training.process.wait(LIMIT_S) == 1, training.said()
        assert "the Ray that this run started has ended" in training.said()
        assert "--resume" in (tmp_path / "log").read_text()
        training.nothing_is_left()
        training.goes_on()
    finally:
        training.process.kill()


def test_the_ray_of_a_program_is_refused_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollover.plugins.ray.cluster import RayCluster, ray

    left: list[bool] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: left.append(True))
    with pytest.raises(ValueError, match="connected to a Ray already"):
        RayCluster(Config.model_validate({"cluster": {"type": "ray"}}), tmp_path)
    assert not left
