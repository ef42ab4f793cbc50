"""A run on servers, for as long as you like, of which again and again a random role is killed or frozen.

    .venv/bin/python scripts/soak.py --minutes 30 --seed 1

The real program with a tiny random model: `rollover train` on embedded servers of its own, reward workers and trainer
ranks, with `--ray` all of them on a Ray of this machine. Every `--every` seconds one process of one role gets SIGKILL
or SIGSTOP. At the end the run is stopped as by Ctrl-C, and this is checked:

- every step is there once, the ledger balances in each row, no rollout was trained twice and no task given twice;
- no group was dropped for a reason that a lost process could be the cause of;
- the memory of the controller, and of every other process that lived long enough, grew by less than 10 %;
- no process and no file in shared memory is left.

Prints what happened as JSON; exit code 1 where a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "integration")]

import runs  # noqa: E402
from runs import check_whole  # noqa: E402

_MARK = "ROLLOVER_SOAK"
# What the command line of each role holds; the first that fits.
_ROLES = {
    "server": b"\0serve\0",
    "reward worker": b"rollover.rewards.child",
    "rank": b"rollover.trainer.ranks",
    "server host": b"ray::ServerRole",
    "reward node": b"ray::RewardRole",
    "rank host": b"ray::RankRole",
}
_SAMPLE_S = 5.0
_SETTLING_S = 60.0
"""A process's memory is compared from then on: it has met the longest rollouts by then."""
_MOST_GROWTH = 1.10
_END_S = 60.0
# Where weights lie: in memory, as in a run that names no folder, but apart from other runs of this machine.
_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


class Soak:
    """One run and what is done to it."""

    def __init__(self, folder: Path, weights: Path, seed: int, servers: int, ranks: int, ray: bool) -> None:
        self.folder, self.weights, self.rng, self.mark = folder, weights, random.Random(seed), uuid.uuid4().hex
        tables: dict[str, dict[str, Any]] = {
            "engine": {
                "kind": "remote",
                "num_servers": servers,
                "max_running": 4,
                "server_timeout_s": 5.0,
                "weights_dir": str(weights),
            },
            "rollout": {"interrupt": "on_weight_update", "overlap": True, "max_new_tokens": 96},
            "rewards": {"num_workers": 2, "timeout_s": 10.0, "retries": 2},
            "checkpoint": {"every_steps": 50, "save_final_model": False},
        }
        if ranks:
            # One that is frozen is noticed by the others only; it may take them a while to load.
            tables["backend"] = {"type": "ranks", "num_ranks": ranks, "rank_timeout_s": 30.0}
        if ray:
            tables["cluster"] = {"type": "ray"}
        self.recipe = runs.write(folder, steps=10**7, rows=200_000, **tables)
        self.roles = [
            role for role, line in _ROLES.items() if (ranks or "rank" not in role) and (ray or b"ray::" not in line)
        ]
        self.done: Counter[str] = Counter()
        self.memory: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        """(role, pid) -> (seconds since the process was first seen, MB)."""

    def run(self, seconds: float, every_s: float) -> dict[str, Any]:
        """Returns what happened. AssertionError where what must hold does not."""
        with open(self.folder / "log", "wb") as log:
            process = subprocess.Popen(
                runs.command("train", self.recipe), stdout=log, stderr=log, env=runs.environment() | {_MARK: self.mark}
            )
        try:
            self._trouble(process, seconds, every_s)
            assert process.poll() is None, f"the run ended: {self._said()}"
            process.send_signal(signal.SIGINT)
            assert process.wait(10 * _END_S) == 130, self._said()
        finally:
            process.kill()
            process.wait()
        return self._checked()

    def _trouble(self, process: subprocess.Popen[bytes], seconds: float, every_s: float) -> None:
        while not self._steps() and process.poll() is None:
            time.sleep(0.2)
        began = time.monotonic()
        next_trouble, first_seen = began + every_s, dict[int, float]()
        while (now := time.monotonic()) < began + seconds and process.poll() is None:
            for pid, role in self._processes().items():
                role = "controller" if pid == process.pid else role
                age_s = now - first_seen.setdefault(pid, now)
                with contextlib.suppress(OSError, StopIteration):
                    self.memory[role, pid].append((age_s, _resident_mb(pid)))
            if now >= next_trouble:
                next_trouble += every_s
                self._one()
            time.sleep(min(_SAMPLE_S, every_s))

    def _one(self) -> None:
        """One process of one role is killed, or stops and is never continued."""
        of_role = self.rng.choice(self.roles)
        there = sorted(pid for pid, role in self._processes().items() if role == of_role)
        if there:
            number = self.rng.choice([signal.SIGKILL, signal.SIGSTOP])
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.rng.choice(there), number)
                self.done[f"{of_role} {'killed' if number == signal.SIGKILL else 'frozen'}"] += 1

    def _processes(self) -> dict[int, str]:
        """pid -> role of every process of the run."""
        found: dict[int, str] = {}
        mark = f"{_MARK}={self.mark}".encode()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    line = Path("/proc", name, "cmdline").read_bytes()
                    found[int(name)] = next((role for role, part in _ROLES.items() if part in line), "other")
        return found

    def _steps(self) -> int:
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def _said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    def _checked(self) -> dict[str, Any]:
        steps = self._steps()
        check_whole(self.folder / "run", steps)
        last = runs.json_lines(self.folder / "run" / "metrics.jsonl")[-1]
        dropped = {k: v for k, v in last.items() if k.startswith("dropped/") and k.endswith("/groups") and v}
        growth = self._growth()
        found = {
            "steps": steps,
            "troubles": dict(self.done),
            "dropped": dropped,
            "counters": {k: last[k] for k in _TOLD if k in last},
            "memory": growth,
        }
        assert set(dropped) <= {"dropped/stale/groups"}, found
        assert last.get("engine/span_mismatches", 0) == 0, found
        for name, of_process in growth.items():
            assert of_process["ratio"] < _MOST_GROWTH, (name, found)
        deadline = time.monotonic() + _END_S
        while (left := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, f"processes are left: {left}"
        assert not (files := list(self.weights.iterdir())), f"files are left in shared memory: {files}"
        return found

    def _growth(self) -> dict[str, dict[str, float]]:
        """Of the processes that lived long enough to tell: the mean memory of the first third, the last third, and
        the ratio."""
        out: dict[str, dict[str, float]] = {}
        for (role, pid), samples in self.memory.items():
            settled = [mb for age_s, mb in samples if age_s >= _SETTLING_S]
            if role != "other" and len(settled) >= 3 * _SETTLING_S / _SAMPLE_S:
                third = len(settled) // 3
                first, end = mean(settled[:third]), mean(settled[-third:])
                out[f"{role} {pid}"] = {"mb_first": round(first, 1), "mb_last": round(end, 1), "ratio": end / first}
        return out


_TOLD = (
    "tokens/generated",
    "tokens/trained",
    "groups/consumed",
    "engine/ejections",
    "engine/lost_requests",
    "engine/abandoned_requests",
    "engine/refused_weights",
    "engine/span_mismatches",
    "rewards/crashes",
    "rewards/timeouts",
    "rewards/retries",
    "train/restarts",
)


def _resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def soak(
    seconds: float,
    *,
    seed: int = 1,
    every_s: float = 60.0,
    servers: int = 2,
    ranks: int = 2,
    ray: bool = False,
    folder: Path | None = None,
) -> dict[str, Any]:
    """What happened in so many seconds. AssertionError where what must hold does not."""
    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory(dir=_MEMORY) as weights:
        return Soak(folder or Path(own), Path(weights), seed, servers, ranks, ray).run(seconds, every_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds from one trouble to the next")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="trainer ranks; 0: one process trains")
    parser.add_argument("--ray", action="store_true", help="the roles are actors of a Ray of this machine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to leave the run; without it, it is removed")
    words = parser.parse_args()
    try:
        found = soak(
            60 * words.minutes, seed=words.seed, every_s=words.every, servers=words.servers, ranks=words.ranks,
            ray=words.ray, folder=words.folder,
        )  # fmt: skip
    except AssertionError as error:
        print(f"seed {words.seed}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
